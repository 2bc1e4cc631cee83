//! Pure: which objects are watched, and what of each is kept.

use common::wire::Name;
use serde_json::{Map, Value};

use crate::{children::Resource, knative::key};

/// One watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// What is watched.
    pub resource: Resource,
    /// Only there; everywhere without.
    pub namespace: Option<String>,
    /// Not there: another watch of the same kind looks there.
    pub except: Option<String>,
    /// Only what has these labels.
    pub labels: Option<&'static str>,
    /// Whether spec and status do not matter.
    pub metadata_only: bool,
}

impl Scope {
    fn all(resource: Resource) -> Self {
        Self { resource, namespace: None, except: None, labels: None, metadata_only: false }
    }

    /// Tells it from other watches.
    pub fn label(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{} of {namespace}", self.resource),
            None => self.resource.to_string(),
        }
    }

    /// Whether an object that this watch does not name is gone.
    pub fn covers(&self, name: &Name) -> bool {
        self.namespace.as_ref().is_none_or(|it| *it == name.namespace)
            && self.except.as_ref().is_none_or(|it| *it != name.namespace)
    }
}

/// Every watch. Services are all watched, so that one in the way of ours is known before we write. Pods are watched
/// twice: those of Revisions everywhere, and all of the system namespace, where our own parts run.
pub fn scopes(system_namespace: &str) -> Vec<Scope> {
    let all = Scope::all;
    let labelled = |resource, labels| Scope { labels: Some(labels), ..all(resource) };
    let metadata = |resource| Scope { metadata_only: true, ..all(resource) };
    let system = |resource| Scope { namespace: Some(system_namespace.into()), ..all(resource) };
    let except = Some(system_namespace.to_owned());
    vec![
        all(Resource::KnativeService),
        all(Resource::Configuration),
        all(Resource::Revision),
        all(Resource::Route),
        all(Resource::DomainMapping),
        all(Resource::PodAutoscaler),
        all(Resource::ServerlessService),
        all(Resource::Service),
        all(Resource::Node),
        metadata(Resource::Metric),
        metadata(Resource::Image),
        all(Resource::ClusterDomainClaim),
        metadata(Resource::Namespace),
        all(Resource::NetworkPolicy),
        labelled(Resource::Deployment, key::REVISION_UID),
        labelled(Resource::HorizontalPodAutoscaler, key::REVISION_UID),
        labelled(Resource::EndpointSlice, "endpointslice.kubernetes.io/managed-by=rouse.dev"),
        Scope { except, ..labelled(Resource::Pod, key::REVISION_UID) },
        system(Resource::Pod),
        system(Resource::ConfigMap),
    ]
}

/// The order in which what there is at the start is listed and taken in: what others depend on first.
const ORDER: [Resource; 14] = [
    Resource::ConfigMap,
    Resource::Namespace,
    Resource::NetworkPolicy,
    Resource::Node,
    Resource::Service,
    Resource::Configuration,
    Resource::Revision,
    Resource::Deployment,
    // Whether a slice leads to an activator must be known before the activator is.
    Resource::EndpointSlice,
    Resource::Pod,
    Resource::Route,
    Resource::KnativeService,
    Resource::DomainMapping,
    Resource::ClusterDomainClaim,
];

/// The place of a kind in that order; `None` where only the writer follows it, at any time.
pub fn place(resource: Resource) -> Option<usize> {
    ORDER.iter().position(|it| *it == resource)
}

/// Drops what nobody here reads.
pub fn trim(scope: &Scope, object: &mut Value) {
    if let (true, Some(all)) = (scope.metadata_only, object.as_object_mut()) {
        all.retain(|field, _| field == "metadata");
    }
    if let Some(meta) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        meta.remove("managedFields");
        meta.remove("selfLink");
        if let Some(Value::Object(all)) = meta.get_mut("annotations") {
            all.remove("kubectl.kubernetes.io/last-applied-configuration");
        }
    }
    keep(scope.resource, object);
}

/// Drops from the parts of an object what is not [kept] of them.
pub fn keep(resource: Resource, object: &mut Value) {
    for (part, fields) in kept(resource) {
        only(object, part, fields);
    }
}

/// Parts of an object, and which fields of each are kept.
pub type Kept = &'static [(&'static str, &'static [&'static str])];

/// Of which parts of an object only some fields are kept: somebody here reads these.
pub const fn kept(resource: Resource) -> Kept {
    match resource {
        Resource::Pod => &[
            ("spec", &["nodeName", "terminationGracePeriodSeconds", "hostNetwork"]),
            (
                "status",
                &[
                    "phase",
                    "podIP",
                    "podIPs",
                    "conditions",
                    "containerStatuses",
                    "initContainerStatuses",
                    "reason",
                    "message",
                ],
            ),
        ],
        Resource::Deployment => &[("spec", &["replicas", "progressDeadlineSeconds"])],
        Resource::Node => &[
            ("spec", &["podCIDRs", "unschedulable", "taints"]),
            ("status", &["conditions", "addresses", "images"]),
        ],
        Resource::Service => {
            &[("spec", &["clusterIP", "clusterIPs", "ports", "type", "selector"]), ("status", &[])]
        }
        Resource::NetworkPolicy => &[("spec", &["podSelector", "policyTypes", "ingress"])],
        Resource::KnativeService
        | Resource::Configuration
        | Resource::Revision
        | Resource::Route
        | Resource::DomainMapping
        | Resource::EndpointSlice
        | Resource::ConfigMap
        | Resource::ClusterDomainClaim
        | Resource::Namespace => &[],
        // Only written: what was applied last and the status tell whether they are as they should be.
        Resource::PodAutoscaler
        | Resource::ServerlessService
        | Resource::HorizontalPodAutoscaler
        | Resource::Metric
        | Resource::Image => &[("spec", &[])],
    }
}

fn only(object: &mut Value, part: &str, fields: &[&str]) {
    let Some(Value::Object(all)) = object.get_mut(part) else { return };
    let kept: Map<String, Value> =
        fields.iter().filter_map(|name| all.remove_entry(*name)).collect();
    *all = kept;
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeSet;

    #[test]
    fn every_kind_is_watched() {
        let scopes = scopes("knative-serving");
        let watched: BTreeSet<Resource> = scopes.iter().map(|it| it.resource).collect();
        assert_eq!(watched, Resource::ALL.into());
    }

    #[test]
    fn a_pod_keeps_only_where_it_is_and_how_it_fares() {
        let mut pod = json!({
            "metadata": {
                "name": "a", "managedFields": [1],
                "annotations": {"a": "b", "kubectl.kubernetes.io/last-applied-configuration": "{}"},
            },
            "spec": {"nodeName": "n", "containers": [1], "volumes": [2]},
            "status": {"phase": "Running", "qosClass": "Burstable"},
        });
        trim(&Scope::all(Resource::Pod), &mut pod);
        let kept = json!({
            "metadata": {"name": "a", "annotations": {"a": "b"}},
            "spec": {"nodeName": "n"},
            "status": {"phase": "Running"},
        });
        assert_eq!(pod, kept);
    }

    #[test]
    fn each_pod_is_covered_by_one_watch() {
        let scopes = scopes("knative-serving");
        let covering = |namespace: &str| {
            let name = Name::new(namespace, "a");
            let pods = scopes.iter().filter(|it| it.resource == Resource::Pod);
            pods.filter(|it| it.covers(&name)).map(|it| it.labels).collect::<Vec<_>>()
        };
        assert_eq!(covering("knative-serving"), [None]);
        assert_eq!(covering("default"), [Some(key::REVISION_UID)]);
    }
}
