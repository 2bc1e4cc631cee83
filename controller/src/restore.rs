//! Pure: objects as they were written → an [`AppState`], so that a restarted controller continues where it stopped.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::Value;

use crate::{
    knative::{KnativeCondition, key},
    render::{ADDRESS, BOOT, CONFIGURATION, REVISION, ROUTE, SERVICE},
    world::{
        AppRevision, AppState, AssignedTraffic, ClusterIpSource, CompactStringMap, ConditionReason,
        ConditionSet, ConditionStatus, ConditionType, ConfigurationState, ObjectMetaSummary,
        PodStage, RevisionPod, RouteNameAllocation, RouteState, RoutingState, ServiceManifest,
        ServiceState, TrafficSpec, Uid, UnixMillis,
    },
};

/// Objects of one app, as read from disk.
#[derive(Clone, Debug, Default)]
pub struct StoredAppObjects {
    /// The app's Service object.
    pub service: Value,
    /// The app's Configuration object.
    pub configuration: Value,
    /// The app's Route object.
    pub route: Value,
    /// Revision objects of the app, in any order.
    pub revisions: Vec<Value>,
    /// Pod objects of the app, in any order.
    pub pods: Vec<Value>,
}

/// Builds the app that these objects describe. `boot` identifies this boot of the machine: pods of an earlier boot no
/// longer exist.
pub fn app(objects: &StoredAppObjects, boot: &str) -> AppState {
    let manifest = manifest(&objects.service);
    let status = &objects.service["status"];
    let mut app = AppState {
        configuration: Some(ConfigurationState {
            meta: meta(&objects.configuration),
            revision: manifest.revision.clone(),
            template: Arc::clone(&manifest.template),
            latest_ready: text(&status["latestReadyRevisionName"]),
            ..ConfigurationState::default()
        }),
        route: Some(RouteState {
            meta: meta(&objects.route),
            wanted: Arc::clone(&manifest.traffic),
            allotted: allotted(&objects.route),
            traffic: array(&status["traffic"]).filter_map(assigned).collect(),
            ..RouteState::default()
        }),
        ..AppState::default()
    };
    app.revisions = objects.revisions.iter().map(|it| revision(it, objects, boot)).collect();
    app.revisions.sort_by(|a, b| (a.meta.generation, &a.name).cmp(&(b.meta.generation, &b.name)));
    conditions(&mut app.conditions, &objects.service, &SERVICE);
    conditions(&mut app.conditions, &objects.configuration, &CONFIGURATION);
    conditions(&mut app.conditions, &objects.route, &ROUTE);
    // Texts read one by one would each take memory of their own: share the template, as before the restart.
    for revision in &mut app.revisions {
        if revision.template == manifest.template {
            revision.template = Arc::clone(&manifest.template);
        }
    }
    let meta = meta(&objects.service);
    app.service = Some(ServiceState { meta, manifest, ..ServiceState::default() });
    app
}

pub(crate) fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

pub(crate) fn text(value: &Value) -> Option<Box<str>> {
    value.as_str().filter(|text| !text.is_empty()).map(Into::into)
}

fn object_meta(object: &Value) -> ObjectMeta {
    serde_json::from_value(object["metadata"].clone()).unwrap_or_default()
}

fn stamp(time: &Time) -> UnixMillis {
    UnixMillis(u64::try_from(time.0.as_millisecond()).unwrap_or_default())
}

pub(crate) fn meta(object: &Value) -> ObjectMetaSummary {
    let meta = object_meta(object);
    ObjectMetaSummary {
        uid: meta.uid.as_deref().and_then(Uid::parse).unwrap_or_default(),
        generation: meta.generation.and_then(|it| u32::try_from(it).ok()).unwrap_or_default(),
        created: meta.creation_timestamp.as_ref().map(stamp).unwrap_or_default(),
    }
}

fn manifest(service: &Value) -> ServiceManifest {
    let meta = object_meta(service);
    let template = &service["spec"]["template"];
    let none = template.is_null() || template.as_str() == Some("");
    ServiceManifest {
        labels: meta.labels.as_ref().map(CompactStringMap::from).unwrap_or_default(),
        annotations: meta.annotations.as_ref().map(CompactStringMap::from).unwrap_or_default(),
        revision: text(&template["metadata"]["name"]),
        template: if none { Arc::from("") } else { canonical(template) },
        traffic: array(&service["spec"]["traffic"]).map(traffic).collect(),
    }
}

/// Returns the template in the form that `parse` writes, whatever the order of its keys on disk.
pub(crate) fn canonical(template: &Value) -> Arc<str> {
    let typed: crate::knative::RevisionTemplate =
        serde_json::from_value(template.clone()).unwrap_or_default();
    serde_json::to_string(&typed).unwrap_or_default().into()
}

fn percent(value: &Value) -> u8 {
    value["percent"].as_u64().and_then(|it| u8::try_from(it).ok()).unwrap_or_default()
}

pub(crate) fn traffic(value: &Value) -> TrafficSpec {
    TrafficSpec {
        tag: text(&value["tag"]),
        revision: text(&value["revisionName"]),
        configuration: text(&value["configurationName"]),
        percent: percent(value),
    }
}

pub(crate) fn assigned(value: &Value) -> Option<AssignedTraffic> {
    Some(AssignedTraffic {
        tag: text(&value["tag"]),
        revision: text(&value["revisionName"])?,
        latest: value["latestRevision"].as_bool().unwrap_or_default(),
        percent: percent(value),
    })
}

fn annotation<'a>(object: &'a Value, name: &str) -> Option<&'a str> {
    object["metadata"]["annotations"][name].as_str()
}

/// Parses the annotation with the Route's allocations: words of the form `tag=host:port`.
fn allotted(route: &Value) -> Vec<RouteNameAllocation> {
    let word = |word: &str| {
        let (tag, numbers) = word.split_once('=')?;
        let (host, port) = numbers.split_once(':')?;
        let tag = Some(tag).filter(|tag| !tag.is_empty()).map(Into::into);
        let addresses = ClusterIpSource::Host(host.parse().ok()?);
        Some(RouteNameAllocation { tag, addresses, port: port.parse().ok()? })
    };
    let words = annotation(route, key::ALLOTTED).unwrap_or_default().split_whitespace();
    words.filter_map(word).collect()
}

fn revision(value: &Value, objects: &StoredAppObjects, boot: &str) -> AppRevision {
    // The label counts, not the object's own `metadata.generation`, which starts at 1 for each Revision.
    let own = object_meta(value);
    let label = |name: &str| own.labels.as_ref().and_then(|it| it.get(name)).map(String::as_str);
    let generation = label(key::CONFIGURATION_GENERATION).and_then(|it| it.parse().ok());
    let routing = match label(key::ROUTING_STATE) {
        Some("active") => RoutingState::Active,
        Some("reserve") => RoutingState::Reserve,
        _ => RoutingState::Pending,
    };
    let since = annotation(value, key::ROUTING_STATE_MODIFIED).and_then(UnixMillis::parse);
    let name = own.name.clone().unwrap_or_default();
    let mine = |pod: &&Value| pod["metadata"]["labels"][key::REVISION] == *name;
    let digest = |it: &Value| Some((text(&it["name"])?, text(&it["imageDigest"])?));
    let mut revision = AppRevision {
        meta: ObjectMetaSummary { generation: generation.unwrap_or_default(), ..meta(value) },
        template: revision_template(value, &own, objects),
        routing: (routing, since.unwrap_or_default()),
        reached: annotation(value, key::REACHED) == Some("true"),
        digests: array(&value["status"]["containerStatuses"]).filter_map(digest).collect(),
        pods: objects.pods.iter().filter(mine).filter_map(|it| pod(it, boot)).collect(),
        name: name.into(),
        ..AppRevision::default()
    };
    conditions(&mut revision.conditions, value, &REVISION);
    revision
}

/// Returns the template a Revision was made of: its metadata without the controller's additions.
fn revision_template(value: &Value, own: &ObjectMeta, objects: &StoredAppObjects) -> Arc<str> {
    let user = |map: &Option<std::collections::BTreeMap<String, String>>| {
        let mut map = map.clone().unwrap_or_default();
        map.retain(|name, _| key::is_users(name));
        Some(map).filter(|map| !map.is_empty())
    };
    // A name chosen by the user is part of the template; a generated one is not.
    let wanted = &objects.service["spec"]["template"]["metadata"]["name"];
    let named = wanted.as_str().is_some_and(|name| own.name.as_deref() == Some(name));
    let metadata = ObjectMeta {
        name: own.name.clone().filter(|_| named),
        labels: user(&own.labels),
        annotations: user(&own.annotations),
        ..ObjectMeta::default()
    };
    let spec = serde_json::from_value(value["spec"].clone()).unwrap_or_default();
    let typed = crate::knative::RevisionTemplate { metadata, spec };
    serde_json::to_string(&typed).unwrap_or_default().into()
}

fn pod(value: &Value, boot: &str) -> Option<RevisionPod> {
    let own = object_meta(value);
    // A reboot ends all containers, so the addresses of an earlier boot's pods may belong to others by now.
    if own.deletion_timestamp.is_some() || annotation(value, BOOT) != Some(boot) {
        return None;
    }
    let remembered = annotation(value, ADDRESS).and_then(|text| text.parse().ok());
    Some(RevisionPod {
        uid: own.uid?.into(),
        name: own.name?.into(),
        created: own.creation_timestamp.as_ref().map(stamp)?,
        met: UnixMillis::default(),
        was_ready: remembered.is_some(),
        steady: None,
        stage: PodStage::Serving,
        remembered,
        placed: None,
    })
}

pub(crate) fn conditions(into: &mut ConditionSet, object: &Value, table: &[(ConditionType, &str)]) {
    let all: Vec<KnativeCondition> =
        serde_json::from_value(object["status"]["conditions"].clone()).unwrap_or_default();
    for (kind, name) in table {
        let Some(it) = all.iter().find(|it| it.r#type == *name) else { continue };
        // Written objects may lack a reason; only `False` requires one.
        let why = ConditionReason::new(it.reason.clone(), it.message.clone());
        let some = Some(why.clone()).filter(|why| !why.reason.is_empty());
        let truth = match it.status.as_str() {
            "True" => ConditionStatus::True(some),
            "False" => ConditionStatus::False(why),
            _ => ConditionStatus::Unknown(some),
        };
        into.set(*kind, truth, UnixMillis::parse(&it.last_transition_time).unwrap_or_default());
    }
}
