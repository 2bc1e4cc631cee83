use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use common::outbox::Outbox;
use serde_json::json;

use super::*;
use crate::{
    kube::{
        cache::Seen,
        decide::{Action, decide},
    },
    machine::{Event, Machine},
    world::{Platform, Settings, Stamp},
};

const UID: &str = "00000000-0000-4000-8000-0000000000";

/// An API server in memory, and the machine that leads on it.
struct Cluster {
    machine: Machine,
    objects: BTreeMap<(Resource, Name), Value>,
    made: u32,
    writes: Vec<String>,
}

fn machine() -> Machine {
    let settings = Settings { platform: Platform::Kubernetes, ..Settings::default() };
    let world = World { settings: Arc::new(settings), seed: 7, ..World::default() };
    Machine::new(world, Outbox::new())
}

fn name(own: &str) -> Name {
    Name::new("default", own)
}

impl Cluster {
    fn new() -> Self {
        let mut cluster =
            Self { machine: machine(), objects: BTreeMap::new(), made: 10, writes: Vec::new() };
        cluster.step(Event::Lead(true));
        cluster
    }

    /// Takes in an event and writes what follows from it, until nothing does.
    fn step(&mut self, event: Event) {
        // The moment at which everything here is made.
        let now = Stamp(1_800_000_000_000);
        let mut keys = self.take(now, event);
        let mut turns = 0;
        while let Some(key) = keys.pop() {
            turns += 1;
            assert!(turns < 5000, "it never ends: {:?}", self.writes);
            if self.write(&key) {
                let object = self.objects.get(&(key.resource, key.name.clone())).cloned();
                let event = Event::Observe(key.resource, key.name.clone(), object.map(Box::new));
                keys.extend(self.take(now, event));
                keys.push(Key { part: Part::Object, ..key });
            }
        }
    }

    /// Takes in an event; no image has a digest.
    fn take(&mut self, now: Stamp, event: Event) -> Vec<Key> {
        let effects = self.machine.step(now, event);
        let mut keys = effects.keys;
        for name in effects.resolve {
            let Some(wanted) = self.machine.wanted_digests(&name) else { continue };
            let none = wanted.images.into_iter().map(|(own, _)| (own, String::new()));
            keys.extend(self.take(now, Event::Resolved(name, Ok(none.collect()))));
        }
        keys
    }

    /// Whether anything was written.
    fn write(&mut self, key: &Key) -> bool {
        let place = (key.resource, key.name.clone());
        let seen = self.objects.get(&place).map(Seen::of);
        match decide(key, want(self.machine.world(), key), seen.as_ref(), None) {
            Action::None => return false,
            Action::NotOwned(trouble) => panic!("{}", trouble.message),
            Action::Create(body) | Action::Apply(body) => self.put(place, body),
            Action::Status(body) => {
                let object = self.objects.get_mut(&place).unwrap();
                object["status"] = body["status"].clone();
            }
            Action::Scale { replicas, .. } => {
                self.objects.get_mut(&place).unwrap()["spec"]["replicas"] = json!(replicas);
            }
            Action::Delete(_) => drop(self.objects.remove(&place)),
        }
        self.writes.push(key.to_string());
        true
    }

    fn put(&mut self, place: (Resource, Name), mut body: Value) {
        self.made += 1;
        let before = self.objects.get(&place);
        let uid = before.map_or_else(
            || json!(format!("{UID}{}", self.made)),
            |it| it["metadata"]["uid"].clone(),
        );
        let generation = before.map_or(1, |it| {
            let same = it["spec"] == body["spec"];
            it["metadata"]["generation"].as_i64().unwrap() + i64::from(!same)
        });
        let status = before.map(|it| it["status"].clone());
        body["metadata"]["uid"] = uid;
        body["metadata"]["generation"] = json!(generation);
        body["metadata"]["namespace"] = json!(place.1.namespace);
        body["metadata"]["name"] = json!(place.1.name);
        body["metadata"]["resourceVersion"] = json!(self.made.to_string());
        body["metadata"]["creationTimestamp"] = json!("2027-01-15T08:00:00Z");
        if place.0 == Resource::Service {
            body["spec"]["clusterIPs"] = json!(["10.96.0.7"]);
        }
        if let Some(status) = status.filter(|it| !it.is_null()) {
            body["status"] = status;
        }
        self.objects.insert(place, body);
    }

    /// What a user or Kubernetes does.
    fn apply(&mut self, resource: Resource, own: &Name, body: Value) {
        self.put((resource, own.clone()), body);
        let object = self.objects[&(resource, own.clone())].clone();
        self.step(Event::Observe(resource, own.clone(), Some(Box::new(object))));
    }

    fn delete(&mut self, resource: Resource, own: &str) {
        self.objects.remove(&(resource, name(own)));
        self.step(Event::Observe(resource, name(own), None));
    }

    fn get(&self, resource: Resource, own: &str) -> &Value {
        &self.objects[&(resource, name(own))]
    }

    fn have(&self) -> BTreeSet<String> {
        let ours = self.objects.keys().filter(|(_, name)| name.namespace == "default");
        ours.map(|(resource, name)| format!("{}/{}", resource.plural(), name.name)).collect()
    }

    fn activator(&mut self) {
        let own = Name::new("knative-serving", "activator-1");
        let status = json!({
            "phase": "Running", "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        });
        let labels = json!({"app": "activator"});
        let body =
            json!({"metadata": {"labels": labels}, "spec": {"nodeName": "n"}, "status": status});
        self.apply(Resource::Pod, &own, body);
    }

    fn service(&mut self, traffic: Value) {
        let template = json!({"spec": {"containers": [{"image": "dev.local/hello"}]}});
        let body = json!({
            "apiVersion": "serving.knative.dev/v1", "kind": "Service",
            "spec": {"template": template, "traffic": traffic},
        });
        self.apply(Resource::KnativeService, &name("hello"), body);
    }

    /// A pod of the first Revision that the kubelet calls ready.
    fn pod(&mut self) {
        let made = self.get(Resource::Deployment, "hello-00001-deployment");
        let labels = made["spec"]["template"]["metadata"]["labels"].clone();
        let status = json!({
            "phase": "Running", "podIP": "10.0.1.1",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "user-container", "state": {"running": {}}}],
        });
        let body =
            json!({"metadata": {"labels": labels}, "spec": {"nodeName": "n"}, "status": status});
        self.apply(Resource::Pod, &name("hello-00001-deployment-a-b"), body);
    }

    fn ready(&self, resource: Resource, own: &str) -> String {
        let conditions = self.get(resource, own)["status"]["conditions"].as_array().cloned();
        let ready = conditions.into_iter().flatten().find(|it| it["type"] == "Ready");
        ready.map(|it| it["status"].as_str().unwrap().to_owned()).unwrap_or_default()
    }
}

const OBJECTS: [&str; 12] = [
    "configurations/hello",
    "deployments/hello-00001-deployment",
    "endpointslices/hello",
    "images/hello-00001-cache-user-container",
    "podautoscalers/hello-00001",
    "revisions/hello-00001",
    "routes/hello",
    "serverlessservices/hello-00001",
    "services/hello",
    "services/hello-00001",
    "services/hello-00001-private",
    "pods/hello-00001-deployment-a-b",
];

#[test]
fn a_service_becomes_its_objects_and_is_ready_with_its_pod() {
    let mut cluster = Cluster::new();
    cluster.activator();
    cluster.service(json!([]));
    assert_ne!(cluster.ready(Resource::KnativeService, "hello"), "True");
    cluster.pod();
    assert_eq!(cluster.have(), OBJECTS.map(str::to_owned).into());
    assert_eq!(cluster.ready(Resource::KnativeService, "hello"), "True");
    let service = cluster.get(Resource::KnativeService, "hello");
    assert_eq!(service["status"]["traffic"][0]["revisionName"], "hello-00001");
}

#[test]
fn a_new_leader_that_finds_everything_as_it_should_be_writes_nothing() {
    let mut cluster = Cluster::new();
    cluster.activator();
    cluster.service(json!([]));
    cluster.pod();
    cluster.machine = machine().loading();
    cluster.writes.clear();
    for ((resource, own), object) in cluster.objects.clone() {
        cluster.step(Event::Observe(resource, own, Some(Box::new(object))));
    }
    cluster.step(Event::Known);
    cluster.step(Event::Lead(true));
    assert_eq!(cluster.writes, Vec::<String>::new());
}

#[test]
fn what_is_deleted_under_a_living_owner_comes_back() {
    let mut cluster = Cluster::new();
    cluster.service(json!([]));
    cluster.pod();
    let before = cluster.have();
    for (resource, own) in [
        (Resource::Service, "hello-00001-private"),
        (Resource::Service, "hello"),
        (Resource::Configuration, "hello"),
    ] {
        cluster.delete(resource, own);
        // The writer looks again at whatever is gone.
        let key = Key::new(resource, Part::Object, name(own));
        let again = cluster.write(&key);
        assert!(again || cluster.have() == before, "{own}");
    }
    assert_eq!(cluster.have(), before);
}

#[test]
fn nothing_is_made_for_what_has_lost_its_owner() {
    let mut cluster = Cluster::new();
    cluster.service(json!([]));
    cluster.pod();
    // Kubernetes takes owners first, then what they own.
    cluster.delete(Resource::KnativeService, "hello");
    for (resource, own) in [
        (Resource::Image, "hello-00001-cache-user-container"),
        (Resource::Deployment, "hello-00001-deployment"),
        (Resource::Service, "hello"),
        (Resource::Configuration, "hello"),
    ] {
        cluster.delete(resource, own);
        assert!(!cluster.write(&Key::new(resource, Part::Object, name(own))), "{own}");
    }
}

#[test]
fn a_tag_that_goes_takes_its_names_with_it() {
    let mut cluster = Cluster::new();
    cluster.activator();
    cluster.service(json!([
        {"latestRevision": true, "percent": 100},
        {"latestRevision": true, "percent": 0, "tag": "blue"},
    ]));
    cluster.pod();
    let tagged = || ["services/blue-hello", "endpointslices/blue-hello"].map(str::to_owned);
    assert!(tagged().iter().all(|it| cluster.have().contains(it)), "{:?}", cluster.have());
    cluster.service(json!([{"latestRevision": true, "percent": 100}]));
    assert!(!tagged().iter().any(|it| cluster.have().contains(it)), "{:?}", cluster.have());
    assert_eq!(cluster.have(), OBJECTS.map(str::to_owned).into());
}
