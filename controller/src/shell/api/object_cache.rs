//! Pure: cache of the objects that the API server holds, with about a hundred bytes for each.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use common::wire::NamespacedName;
use serde_json::Value;

use super::watch_scope::{WatchScope, has_revision_label};
use crate::model::{
    knative::key,
    object::{
        ObjectPartKey, ResourceKind,
        hash::{applied_hash, stable_json_hash},
        json,
    },
};

/// Origin of an object that the cache stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectOrigin {
    /// A watch or a read, or a write of a part of the object.
    Observed,
    /// The response to the controller's own apply of the whole object.
    OwnApply,
}

/// Entry of the cache: what the writer needs to know of one object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedObject {
    /// UID of the object.
    pub uid: Box<str>,
    /// Value of the object's `resourceVersion`.
    pub resource_version: Box<str>,
    /// The object's `generation`, a count of its spec's changes; 0 for kinds that have none.
    pub generation: i64,
    /// Hash of the body that the controller applied last, if any.
    pub applied_hash: Option<u64>,
    /// UID of the owner with `controller: true`.
    pub controller_uid: Option<Box<str>>,
    /// Hash of the object's status.
    pub status_hash: u64,
    /// Value of `spec.replicas`, if any.
    pub replicas: Option<i64>,
    /// True if the object has a `deletionTimestamp`.
    pub is_terminating: bool,
    /// Hash of the spec, or of a ConfigMap's data, for kinds without a generation; otherwise 0.
    pub spec_hash: u64,
    /// True if another client changed the spec after the controller's last apply.
    pub changed_by_others: bool,
    /// True if the object has the label of a Revision.
    pub has_revision_label: bool,
    /// Number of pods that the controller wrote last, as the workload of a scaled Service records it.
    pub scaled_to: Option<u32>,
    /// Number of pods that its user wants, as the workload of a scaled Service records it.
    pub user_replicas: Option<u32>,
}

/// Returns the hash of an object's spec, or of the data of a ConfigMap. The API server leaves empty data out.
pub fn spec_hash(object: &Value) -> u64 {
    let is_empty = |data: &Value| data.as_object().is_some_and(serde_json::Map::is_empty);
    let data = object.get("data").filter(|it| !is_empty(it));
    stable_json_hash(object.get("spec").or(data).unwrap_or(&Value::Null))
}

impl ObservedObject {
    /// Returns the entry for an object as the API server sent it.
    pub fn from_object(object: &Value) -> Self {
        let meta = &object["metadata"];
        let text = |field: &str| meta[field].as_str().unwrap_or_default().into();
        let owners = meta["ownerReferences"].as_array();
        let controller = owners.into_iter().flatten().find(|it| it["controller"] == true);
        let generation = meta["generation"].as_i64().unwrap_or(0);
        let number = |key: &str| json::annotation(object, key).and_then(|it| it.parse().ok());
        Self {
            uid: text("uid"),
            resource_version: text("resourceVersion"),
            generation,
            applied_hash: applied_hash(object),
            controller_uid: controller.and_then(|it| it["uid"].as_str()).map(Into::into),
            status_hash: stable_json_hash(&object["status"]),
            replicas: object["spec"]["replicas"].as_i64(),
            is_terminating: meta["deletionTimestamp"].is_string(),
            // The API server counts changes of a spec only for some kinds; for the others the hash shows them.
            spec_hash: if generation == 0 { spec_hash(object) } else { 0 },
            changed_by_others: false,
            has_revision_label: has_revision_label(object),
            scaled_to: number(key::SCALED_TO),
            user_replicas: number(key::USER_REPLICAS),
        }
    }

    /// Returns true if another client changed the spec between `self` and `new`, since the controller's last apply.
    ///
    /// The spec of an object without an owner is its user's. Scaling a Deployment does not count as a change. A single
    /// change that scales and changes another field is taken for scaling only.
    fn is_changed_by_others(&self, new: &Self) -> bool {
        let changes = new.generation - self.generation;
        let scaled = i64::from(new.replicas != self.replicas);
        let is_ours = new.controller_uid.is_some() && new.applied_hash == self.applied_hash;
        is_ours && (self.changed_by_others || changes > scaled || new.spec_hash != self.spec_hash)
    }
}

/// All watched objects, as last observed.
#[derive(Debug, Default)]
pub struct ObjectCache {
    objects: BTreeMap<ResourceKind, HashMap<NamespacedName, ObservedObject>>,
    /// Objects that the current lists of each scope have not named yet.
    unlisted: Vec<(WatchScope, BTreeSet<NamespacedName>)>,
    /// Keys of the requests under way whose objects were not deleted since the request began.
    open_requests: BTreeSet<ObjectPartKey>,
}

impl ObjectCache {
    /// Returns the entry of an object, if it is known.
    pub fn get(&self, resource: ResourceKind, name: &NamespacedName) -> Option<&ObservedObject> {
        self.objects.get(&resource)?.get(name)
    }

    /// Returns the number of known objects of a kind.
    pub fn count(&self, resource: ResourceKind) -> usize {
        self.objects.get(&resource).map_or(0, HashMap::len)
    }

    /// Begins a full list of a watch's objects, after a start or a lost watch.
    pub fn begin_list(&mut self, scope: &WatchScope) {
        let all = self.objects.get(&scope.resource).into_iter().flatten();
        let covered = all.filter(|(name, object)| scope.covers(name, object.has_revision_label));
        let names = covered.map(|(name, _)| name.clone()).collect();
        // kube's watcher may begin a list again before the last one ended.
        self.unlisted.retain(|(listed_scope, _)| listed_scope != scope);
        self.unlisted.push((scope.clone(), names));
    }

    /// Ends a full list. Returns the objects that the list did not name: they are deleted. Their entries stay until
    /// [`remove`](Self::remove).
    pub fn end_list(&mut self, scope: &WatchScope) -> Vec<NamespacedName> {
        let Some(at) = self.unlisted.iter().position(|(listed_scope, _)| listed_scope == scope)
        else {
            return Vec::new();
        };
        let (_, missing) = self.unlisted.swap_remove(at);
        missing.into_iter().collect()
    }

    /// Stores an object from a watch. Returns true if anything is new: a watch may lag behind our own writes.
    pub fn apply_watched(
        &mut self,
        resource: ResourceKind,
        name: &NamespacedName,
        observed: ObservedObject,
    ) -> bool {
        for (_, names) in self.unlisted.iter_mut().filter(|(scope, _)| scope.resource == resource) {
            names.remove(name);
        }
        self.insert(resource, name, observed, ObjectOrigin::Observed)
    }

    /// Marks a request about the object of `key` as under way, until [`end_request`](Self::end_request).
    pub fn begin_request(&mut self, key: &ObjectPartKey) {
        self.open_requests.insert(key.clone());
    }

    /// Stores an object from a response. Returns true if the response was accepted.
    ///
    /// A response is refused if the object was deleted since the request began. Otherwise the object would stay in the
    /// cache forever, since a watch reports a deletion only once.
    pub fn apply_response(
        &mut self,
        key: &ObjectPartKey,
        observed: ObservedObject,
        origin: ObjectOrigin,
    ) -> bool {
        let ObjectPartKey { resource, name, .. } = key;
        if !self.open_requests.contains(key) {
            return false;
        }
        if self.get(*resource, name).is_none() {
            // The current list may be of a time after a second deletion. If it is of a time before the creation, the
            // watch reports the creation next.
            let covers = |scope: &WatchScope| {
                scope.resource == *resource && scope.covers(name, observed.has_revision_label)
            };
            for (_, names) in self.unlisted.iter_mut().filter(|(scope, _)| covers(scope)) {
                names.insert(name.clone());
            }
        }
        self.insert(*resource, name, observed, origin);
        true
    }

    /// Marks the request about `key` as finished.
    pub fn end_request(&mut self, key: &ObjectPartKey) {
        self.open_requests.remove(key);
    }

    /// Marks all requests as finished, since the writes under way were stopped.
    pub fn end_all_requests(&mut self) {
        self.open_requests.clear();
    }

    fn insert(
        &mut self,
        resource: ResourceKind,
        name: &NamespacedName,
        mut observed: ObservedObject,
        origin: ObjectOrigin,
    ) -> bool {
        let all = self.objects.entry(resource).or_default();
        // Versions are comparable only within one object: a new UID always wins.
        let cached = all.get(name).filter(|cached| cached.uid == observed.uid);
        if cached.is_some_and(|cached| is_older(&observed, cached)) {
            return false;
        }
        // Others change the spec of a pod rightly, as by a resize: the controller applies only annotations of pods.
        observed.changed_by_others = origin == ObjectOrigin::Observed
            && resource != ResourceKind::Pod
            && cached.is_some_and(|cached| cached.is_changed_by_others(&observed));
        let is_news = cached != Some(&observed);
        all.insert(name.clone(), observed);
        is_news
    }

    /// Stores the replicas of a Deployment from the response to a scale, as of `version`. The watch reports any other
    /// difference.
    pub fn apply_scale(
        &mut self,
        resource: ResourceKind,
        name: &NamespacedName,
        version: &str,
        replicas: i64,
    ) {
        if let Some(cached) = self.get(resource, name) {
            let (version, replicas) = (version.into(), Some(replicas));
            // The API server raises the generation only if the number differs.
            let generation = cached.generation + i64::from(cached.replicas != replicas);
            let observed = ObservedObject {
                resource_version: version,
                generation,
                replicas,
                ..cached.clone()
            };
            self.insert(resource, name, observed, ObjectOrigin::Observed);
        }
    }

    /// Returns true if an object is known and not in this scope: another watch of its kind has it now.
    pub fn has_left(&self, scope: &WatchScope, name: &NamespacedName) -> bool {
        let known = self.get(scope.resource, name);
        known.is_some_and(|it| !scope.covers(name, it.has_revision_label))
    }

    /// Removes a deleted object, and the marks of requests about it.
    pub fn remove(&mut self, resource: ResourceKind, name: &NamespacedName) {
        self.open_requests.retain(|key| key.resource != resource || key.name != *name);
        if let Some(all) = self.objects.get_mut(&resource) {
            all.remove(name);
        }
    }
}

/// Returns true if `new` is an older version than `cached`. Kubernetes promises since 1.35 that versions of one kind
/// compare as numbers; before, they did without a promise. If a version is no number, the newest to arrive wins.
fn is_older(new: &ObservedObject, cached: &ObservedObject) -> bool {
    let number = |object: &ObservedObject| object.resource_version.parse::<u128>().ok();
    number(new).zip(number(cached)).is_some_and(|(new, cached)| new < cached)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::object::ObjectPart;
    use serde_json::json;

    fn name(name: &str) -> NamespacedName {
        NamespacedName::new("default", name)
    }

    fn seen(version: &str) -> ObservedObject {
        ObservedObject {
            uid: "u".into(),
            resource_version: version.into(),
            ..ObservedObject::default()
        }
    }

    #[test]
    fn a_config_map_has_the_hash_of_its_data() {
        let hash = |object: Value| ObservedObject::from_object(&object).spec_hash;
        let [one, other] = ["1", "2"].map(|it| hash(json!({"data": {"a": it}})));
        assert_ne!(one, other);
        assert_eq!(hash(json!({"data": {}})), hash(json!({})), "the API server leaves them out");
        assert_ne!(one, hash(json!({})));
    }

    #[test]
    fn an_observed_object_has_the_facts_that_writes_depend_on() {
        let object = json!({
            "metadata": {
                "uid": "u", "resourceVersion": "7", "generation": 3, "deletionTimestamp": "2026-01-01T00:00:00Z",
                "annotations": {"rouse.dev/applied": "ff"},
                "ownerReferences": [{"uid": "other"}, {"uid": "boss", "controller": true}],
            },
            "spec": {"replicas": 4},
            "status": {"a": 1},
        });
        let expected = ObservedObject {
            uid: "u".into(),
            resource_version: "7".into(),
            generation: 3,
            applied_hash: Some(255),
            controller_uid: Some("boss".into()),
            status_hash: stable_json_hash(&json!({"a": 1})),
            replicas: Some(4),
            is_terminating: true,
            ..ObservedObject::default()
        };
        assert_eq!(ObservedObject::from_object(&object), expected);
    }

    /// Returns a Deployment of this version and generation, with this number of replicas.
    fn deployment(version: &str, generation: i64, replicas: i64) -> ObservedObject {
        let controller = Some("boss".into());
        ObservedObject {
            generation,
            replicas: Some(replicas),
            applied_hash: Some(1),
            controller_uid: controller,
            ..seen(version)
        }
    }

    #[test]
    fn a_change_by_others_is_known_until_the_next_apply() {
        let (mut cache, kind) = (ObjectCache::default(), ResourceKind::Deployment);
        let key = ObjectPartKey::new(kind, ObjectPart::Object, name("a"));
        let is_changed =
            |cache: &ObjectCache| cache.get(kind, &name("a")).map(|it| it.changed_by_others);
        cache.apply_watched(kind, &name("a"), deployment("1", 1, 0));
        cache.apply_watched(kind, &name("a"), deployment("2", 1, 0));
        assert_eq!(is_changed(&cache), Some(false), "its status");
        cache.apply_watched(kind, &name("a"), deployment("3", 2, 0));
        assert_eq!(is_changed(&cache), Some(true));
        assert!(!cache.apply_watched(kind, &name("a"), deployment("3", 2, 0)), "no news");
        cache.apply_watched(kind, &name("a"), deployment("4", 2, 0));
        assert_eq!(is_changed(&cache), Some(true), "still");
        cache.begin_request(&key);
        cache.apply_response(&key, deployment("5", 3, 0), ObjectOrigin::Observed);
        assert_eq!(is_changed(&cache), Some(true), "it was only read");
        cache.apply_response(&key, deployment("6", 4, 0), ObjectOrigin::OwnApply);
        cache.apply_watched(kind, &name("a"), deployment("6", 4, 0));
        assert_eq!(is_changed(&cache), Some(false));
        cache.apply_watched(
            kind,
            &name("a"),
            ObservedObject { applied_hash: Some(2), ..deployment("7", 5, 0) },
        );
        assert_eq!(is_changed(&cache), Some(false), "we applied another, and the watch was first");
        cache.apply_watched(kind, &name("a"), deployment("8", 6, 0));
        cache.apply_watched(
            kind,
            &name("a"),
            ObservedObject { uid: "v".into(), ..deployment("9", 1, 0) },
        );
        assert_eq!(is_changed(&cache), Some(false), "another object");
        cache.apply_watched(
            kind,
            &name("b"),
            ObservedObject { controller_uid: None, ..deployment("1", 1, 0) },
        );
        cache.apply_watched(
            kind,
            &name("b"),
            ObservedObject { controller_uid: None, ..deployment("2", 2, 0) },
        );
        assert!(
            cache.get(kind, &name("b")).is_some_and(|it| !it.changed_by_others),
            "a user's own"
        );
    }

    /// Otherwise each resize of a pod with an annotation of the controller would be followed by three requests.
    #[test]
    fn a_resized_pod_is_not_a_changed_one() {
        let (mut cache, kind) = (ObjectCache::default(), ResourceKind::Pod);
        for (version, generation) in [("1", 1), ("2", 2)] {
            cache.apply_watched(kind, &name("a"), deployment(version, generation, 0));
        }
        assert!(cache.get(kind, &name("a")).is_some_and(|it| !it.changed_by_others));
    }

    #[test]
    fn a_scaled_deployment_is_not_a_changed_one() {
        let (mut cache, kind) = (ObjectCache::default(), ResourceKind::Deployment);
        let is_changed =
            |cache: &ObjectCache| cache.get(kind, &name("a")).map(|it| it.changed_by_others);
        cache.apply_watched(kind, &name("a"), deployment("1", 1, 0));
        cache.apply_scale(kind, &name("a"), "2", 1);
        cache.apply_watched(kind, &name("a"), deployment("2", 2, 1));
        assert_eq!(is_changed(&cache), Some(false), "the response was first");
        cache.apply_watched(kind, &name("a"), deployment("3", 3, 0));
        cache.apply_scale(kind, &name("a"), "3", 0);
        assert_eq!(is_changed(&cache), Some(false), "the watch was first");
        cache.apply_watched(kind, &name("a"), deployment("4", 5, 3));
        assert_eq!(is_changed(&cache), Some(true), "scaled and changed");
    }

    #[test]
    fn a_spec_whose_changes_are_not_counted_is_compared() {
        let (mut cache, kind) = (ObjectCache::default(), ResourceKind::Service);
        let of = |version: &str, port: i64| {
            let owners = json!([{"uid": "boss", "controller": true}]);
            let meta = json!({"uid": "u", "resourceVersion": version, "ownerReferences": owners});
            ObservedObject::from_object(&json!({"metadata": meta, "spec": {"port": port}}))
        };
        let is_changed =
            |cache: &ObjectCache| cache.get(kind, &name("a")).map(|it| it.changed_by_others);
        cache.apply_watched(kind, &name("a"), of("1", 80));
        cache.apply_watched(kind, &name("a"), of("2", 80));
        assert_eq!(is_changed(&cache), Some(false));
        cache.apply_watched(kind, &name("a"), of("3", 81));
        assert_eq!(is_changed(&cache), Some(true));
    }

    #[test]
    fn order_of_fields_does_not_change_a_hash_and_everything_else_does() {
        let of = |text: &str| stable_json_hash(&serde_json::from_str(text).unwrap());
        assert_eq!(of(r#"{"a":1,"b":[2]}"#), of(r#"{"b":[2],"a":1}"#));
        let all = ["{}", "[]", "null", "\"\"", "0", "[0]", "[[0]]", r#"{"a":0}"#, r#"{"a":null}"#];
        let hashes: BTreeSet<u64> = all.iter().map(|it| of(it)).collect();
        assert_eq!(hashes.len(), all.len());
    }

    #[test]
    fn objects_that_a_new_list_omits_are_returned() {
        let mut cache = ObjectCache::default();
        let kind = ResourceKind::Pod;
        let of_revision =
            |version: &str| ObservedObject { has_revision_label: true, ..seen(version) };
        cache.apply_watched(kind, &NamespacedName::new("default-system", "part"), seen("1"));
        cache.apply_watched(kind, &name("of-a-user"), seen("1"));
        for object_name in ["a", "b"] {
            cache.apply_watched(kind, &name(object_name), of_revision("1"));
        }
        let scope = &pod_scope(true);
        cache.begin_list(scope);
        cache.apply_watched(kind, &name("b"), of_revision("1"));
        cache.apply_watched(kind, &name("c"), of_revision("2"));
        assert_eq!(cache.end_list(scope), [name("a")]);
        assert_eq!(cache.count(kind), 5, "they stay until they are removed");
        assert_eq!(cache.end_list(scope), []);
        let scope = &pod_scope(false);
        cache.begin_list(scope);
        assert_eq!(cache.end_list(scope), [name("of-a-user")]);
    }

    /// Returns the scope of the pods outside the system namespace, of Revisions or of users.
    fn pod_scope(is_of_revisions: bool) -> WatchScope {
        use crate::shell::api::watch_scope::{watch_scopes, workload_scopes};
        let mut all = [watch_scopes("default-system"), workload_scopes("default-system")].concat();
        all.retain(|it| {
            it.resource == ResourceKind::Pod && it.has_revision_label == Some(is_of_revisions)
        });
        all.swap_remove(0)
    }

    /// Both watches of a kind report an object whose label was changed: one as new, the other as deleted.
    #[test]
    fn an_object_that_moves_to_another_watch_is_not_deleted() {
        let (mut cache, kind) = (ObjectCache::default(), ResourceKind::Pod);
        let of_revision = ObservedObject { has_revision_label: true, ..seen("2") };
        cache.apply_watched(kind, &name("a"), seen("1"));
        assert!(!cache.has_left(&pod_scope(false), &name("a")), "it was deleted, or leaves first");
        cache.apply_watched(kind, &name("a"), of_revision);
        assert!(cache.has_left(&pod_scope(false), &name("a")));
        assert!(!cache.has_left(&pod_scope(true), &name("a")));
        assert!(!cache.has_left(&pod_scope(true), &name("b")), "it is not known");
    }

    /// A response to a write names an object that the current list of its watch may omit.
    #[test]
    fn a_response_about_a_users_object_does_not_outlive_the_list_of_users() {
        let (mut cache, kind) = (ObjectCache::default(), ResourceKind::Pod);
        let key = ObjectPartKey::new(kind, ObjectPart::Object, name("a"));
        [true, false].iter().for_each(|it| cache.begin_list(&pod_scope(*it)));
        cache.begin_request(&key);
        assert!(cache.apply_response(&key, seen("1"), ObjectOrigin::Observed));
        assert_eq!(cache.end_list(&pod_scope(true)), []);
        assert_eq!(cache.end_list(&pod_scope(false)), [name("a")]);
    }

    #[test]
    fn the_record_of_replicas_is_read_as_far_as_it_is_readable() {
        let record = |annotations: Value| {
            let meta = json!({"name": "a", "annotations": annotations});
            let observed = ObservedObject::from_object(&json!({"metadata": meta}));
            (observed.scaled_to, observed.user_replicas)
        };
        let both = json!({key::SCALED_TO: "0", key::USER_REPLICAS: "3"});
        assert_eq!(record(both), (Some(0), Some(3)));
        assert_eq!(record(json!({key::SCALED_TO: "-1"})), (None, None));
        assert_eq!(record(json!({key::USER_REPLICAS: "2"})), (None, Some(2)));
    }

    #[test]
    fn a_response_from_before_a_deletion_is_ignored() {
        let mut cache = ObjectCache::default();
        let key =
            |own: &str| ObjectPartKey::new(ResourceKind::Service, ObjectPart::Object, name(own));
        let (a, b) = (key("a"), key("b"));
        [&a, &b].into_iter().for_each(|it| cache.begin_request(it));
        assert!(cache.apply_response(&a, seen("1"), ObjectOrigin::OwnApply));
        cache.remove(ResourceKind::Service, &name("a"));
        assert!(!cache.apply_response(&a, seen("2"), ObjectOrigin::OwnApply));
        assert!(cache.apply_response(&b, seen("3"), ObjectOrigin::OwnApply), "another object");
        assert_eq!((cache.get(a.resource, &a.name), cache.count(a.resource)), (None, 1));
        cache.end_request(&a);
        cache.begin_request(&a);
        let is_accepted = cache.apply_response(&a, seen("4"), ObjectOrigin::OwnApply);
        assert!(is_accepted, "asked after the loss");
        [&a, &b].into_iter().for_each(|it| cache.end_request(it));
        assert!(cache.open_requests.is_empty());
    }

    #[test]
    fn a_response_does_not_outlive_a_list_that_omits_it() {
        let (mut cache, kind) = (ObjectCache::default(), ResourceKind::Service);
        let scopes = crate::shell::api::watch_scope::watch_scopes("default-system");
        let scope = scopes.iter().find(|it| it.resource == kind).unwrap();
        cache.apply_watched(kind, &name("old"), seen("1"));
        cache.begin_list(scope);
        for object_name in ["old", "new", "named"] {
            let key = ObjectPartKey::new(kind, ObjectPart::Object, name(object_name));
            cache.begin_request(&key);
            assert!(cache.apply_response(&key, seen("2"), ObjectOrigin::OwnApply));
        }
        cache.apply_watched(kind, &name("named"), seen("2"));
        let missing = cache.end_list(scope);
        assert_eq!(missing, [name("new"), name("old")]);
        missing.iter().for_each(|it| cache.remove(kind, it));
        assert_eq!((cache.get(kind, &name("named")), cache.count(kind)), (Some(&seen("2")), 1));
    }

    #[test]
    fn a_watch_that_lags_does_not_undo_what_was_written() {
        let mut cache = ObjectCache::default();
        let kind = ResourceKind::Deployment;
        assert!(cache.apply_watched(kind, &name("a"), seen("10")));
        assert!(!cache.apply_watched(kind, &name("a"), seen("9")));
        assert_eq!(cache.get(kind, &name("a")), Some(&seen("10")));
        let other = ObservedObject { uid: "v".into(), ..seen("8") };
        assert!(cache.apply_watched(kind, &name("a"), other.clone()), "another object of the name");
        assert_eq!(cache.get(kind, &name("a")), Some(&other));
    }
}
