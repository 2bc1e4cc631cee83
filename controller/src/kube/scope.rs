//! Pure: scopes of the watches, and the fields that are kept of each kind.

use common::wire::Name;
use serde_json::{Map, Value};

use crate::{children::Resource, knative::key};

/// Scope of one watch: a kind, and a selection of its objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Kind of the watched objects.
    pub resource: Resource,
    /// Namespace to watch; `None`: all namespaces.
    pub namespace: Option<String>,
    /// Namespace to leave out, since another watch of the same kind covers it.
    pub except: Option<String>,
    /// Label selector, if the watch has one.
    pub labels: Option<&'static str>,
    /// True if only the metadata is kept, without spec and status.
    pub metadata_only: bool,
}

impl Scope {
    fn all(resource: Resource) -> Self {
        Self { resource, namespace: None, except: None, labels: None, metadata_only: false }
    }

    /// Returns a text that distinguishes this watch from all others.
    pub fn label(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{} of {namespace}", self.resource),
            None => self.resource.to_string(),
        }
    }

    /// Returns true if an object that this watch's list does not name is deleted.
    pub fn covers(&self, name: &Name) -> bool {
        self.namespace.as_ref().is_none_or(|it| *it == name.namespace)
            && self.except.as_ref().is_none_or(|it| *it != name.namespace)
    }
}

/// Returns the scopes of all watches.
///
/// All Kubernetes Services are watched, so that a conflicting one is known before a write. Pods have two watches:
/// Revision pods in every namespace, and all pods of the system namespace, where Rouse's own components run.
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
        // The metadata of these kinds holds everything that is compared: the applied hash and the generation.
        metadata(Resource::Metric),
        metadata(Resource::Image),
        all(Resource::ClusterDomainClaim),
        metadata(Resource::Namespace),
        all(Resource::NetworkPolicy),
        // Users may have many Deployments and pods of their own, which the label excludes.
        labelled(Resource::Deployment, key::REVISION_UID),
        labelled(Resource::HorizontalPodAutoscaler, key::REVISION_UID),
        labelled(Resource::EndpointSlice, "endpointslice.kubernetes.io/managed-by=rouse.dev"),
        Scope { except, ..labelled(Resource::Pod, key::REVISION_UID) },
        system(Resource::Pod),
        system(Resource::ConfigMap),
    ]
}

/// Order of the first lists: kinds that others depend on come first.
const ORDER: [Resource; 14] = [
    Resource::ConfigMap,
    Resource::Namespace,
    Resource::NetworkPolicy,
    Resource::Node,
    Resource::Service,
    Resource::Configuration,
    Resource::Revision,
    Resource::Deployment,
    // An activator must not be known before its slice, which states whether connections are routed to it.
    Resource::EndpointSlice,
    Resource::Pod,
    Resource::Route,
    Resource::KnativeService,
    Resource::DomainMapping,
    Resource::ClusterDomainClaim,
];

/// Returns the place of a kind in the order of the first lists; `None` if only the writer reads the kind.
pub fn place(resource: Resource) -> Option<usize> {
    ORDER.iter().position(|it| *it == resource)
}

/// Removes the fields that the controller does not read.
pub fn trim(scope: &Scope, object: &mut Value) {
    if let (true, Some(all)) = (scope.metadata_only, object.as_object_mut()) {
        all.retain(|field, _| field == "metadata");
    }
    // `managedFields` and the last applied configuration repeat most of the object.
    if let Some(meta) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        meta.remove("managedFields");
        meta.remove("selfLink");
        if let Some(Value::Object(all)) = meta.get_mut("annotations") {
            all.remove("kubectl.kubernetes.io/last-applied-configuration");
        }
    }
    keep(scope.resource, object);
}

/// Removes fields that are not [kept] from the parts of an object.
pub fn keep(resource: Resource, object: &mut Value) {
    for (part, fields) in kept(resource) {
        only(object, part, fields);
    }
}

/// Parts of an object, each with the fields of it that are kept.
pub type Kept = &'static [(&'static str, &'static [&'static str])];

/// Returns the parts of a kind of which only some fields are kept, since the controller reads no others.
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
        // These kinds are only written: the applied hash and the status suffice to find a difference.
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
