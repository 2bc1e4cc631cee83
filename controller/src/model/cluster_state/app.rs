//! Pure: state of one app: its Service, Configuration and Route.

use std::{collections::BTreeMap, net::IpAddr, num::NonZeroU16, sync::Arc, time::Duration};

use super::{
    AppRevision, RevisionPod,
    conditions::{ConditionReason, ConditionSet},
    scaled_service::{ScaledServiceState, WorkloadBinding},
    settings::PlatformKind,
    topology::HintMode,
    values::{CompactStringMap, ObjectMetaSummary, Uid, UnixMillis},
};
use crate::model::rollout::Rollout;

/// All objects of one name in a namespace: a Service with its child objects, a Configuration or Route alone, or a
/// scaled Service.
///
/// An object with the UID 0 is desired and does not exist yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AppState {
    /// The Service, unless the Configuration or Route exists alone.
    pub service: Option<ServiceState>,
    /// The Configuration, once there is one.
    pub configuration: Option<ConfigurationState>,
    /// The Route, once there is one.
    pub route: Option<RouteState>,
    /// Revisions of the Configuration, oldest first.
    pub revisions: Vec<AppRevision>,
    /// Conditions of Service, Configuration and Route.
    pub conditions: ConditionSet,
    /// True once the Configuration was observed and is deleted: Kubernetes deletes its Revisions, except for orphans.
    pub is_configuration_deleted: bool,
    /// The scaled Service of this name, if there is one. While it scales a workload, the app has nothing of Knative.
    pub scaled: Option<Box<ScaledServiceState>>,
}

impl AppState {
    /// Returns true if the app has a Service, Configuration or Route of Knative.
    pub fn has_knative_object(&self) -> bool {
        self.service.is_some() || self.configuration.is_some() || self.route.is_some()
    }

    /// Returns true if the app is a scaled Service, and has nothing of Knative.
    pub fn is_scaled_service_only(&self) -> bool {
        self.scaled.is_some()
            && !self.has_knative_object()
            && self.revisions.iter().all(|it| it.is_scaled_service)
    }

    /// Returns the scaled Service that scales a workload, with the workload and the Revision that stands for it.
    pub fn scaled_revision(&self) -> Option<(&ScaledServiceState, &WorkloadBinding, &AppRevision)> {
        let scaled = self.scaled.as_deref()?;
        let revision = self.revisions.iter().find(|it| it.is_scaled_service)?;
        Some((scaled, scaled.binding.as_ref()?, revision))
    }

    /// Returns true if the app's Service is being deleted.
    pub fn is_terminating(&self) -> bool {
        self.service.as_ref().is_some_and(|it| it.is_terminating)
    }

    /// Returns true if all child objects end with the Service. On Kubernetes each object is deleted on its own. All of
    /// them stay and serve if the Service is deleted with `--cascade=orphan`, or kept by finalizers of others.
    pub fn cascades_deletion(&self, platform: PlatformKind) -> bool {
        // The local node has no `--cascade` and no finalizers.
        platform == PlatformKind::Local && self.is_terminating()
    }

    /// Returns true if a Revision exists that needs no Configuration. It is an orphan, or was observed before its
    /// Configuration, since each kind has a watch of its own.
    pub fn has_lone_revision(&self) -> bool {
        let mut revisions = self.revisions.iter().filter(|it| it.meta.exists() && !it.is_deleted);
        revisions.any(|it| it.is_orphan || !self.is_configuration_deleted)
    }

    /// Returns the Revision of the newest template, once it exists.
    pub fn latest_created(&self) -> Option<&AppRevision> {
        let configuration = self.configuration.as_ref()?;
        // A name identifies the template; without one the generation does, since each change makes a new Revision.
        self.revisions.iter().filter(|it| !it.is_deleted).find(|revision| {
            match &configuration.revision_name {
                Some(name) => revision.name == *name,
                None => revision.meta.generation == configuration.meta.generation,
            }
        })
    }

    /// Returns the name of the newest Revision that has ever been ready.
    pub fn latest_ready(&self) -> Option<&str> {
        self.configuration.as_ref()?.latest_ready.as_deref()
    }

    /// Returns the Route's traffic targets in force.
    pub fn traffic(&self) -> &[AssignedTraffic] {
        self.route.as_ref().map(|it| &*it.traffic).unwrap_or_default()
    }

    /// Returns the allocations of the Route's names.
    pub fn allocations(&self) -> &[RouteNameAllocation] {
        self.route.as_ref().map(|it| &*it.allocations).unwrap_or_default()
    }

    /// Returns a label of the Route, or of the Service that owns it.
    pub fn route_label(&self, key: &str) -> Option<&str> {
        self.route_metadata(|manifest| &manifest.labels, |route| &route.labels)?.get(key)
    }

    /// Returns an annotation of the Route, or of the Service that owns it.
    pub fn route_annotation(&self, key: &str) -> Option<&str> {
        self.route_metadata(|manifest| &manifest.annotations, |route| &route.annotations)?.get(key)
    }

    /// Returns the rule for hints by the annotations of the Route, or of the Service that owns it.
    pub fn route_hint_mode(&self) -> HintMode {
        HintMode::from_annotations(|key| self.route_annotation(key))
    }

    /// Returns all labels of the Route, or of the Service that owns it.
    pub fn route_labels(&self) -> BTreeMap<String, String> {
        let labels = self.route_metadata(|manifest| &manifest.labels, |route| &route.labels);
        labels.map(CompactStringMap::to_btree_map).unwrap_or_default()
    }

    /// Returns all annotations of the Route, or of the Service that owns it.
    pub fn route_annotations(&self) -> BTreeMap<String, String> {
        let annotations =
            self.route_metadata(|manifest| &manifest.annotations, |route| &route.annotations);
        annotations.map(CompactStringMap::to_btree_map).unwrap_or_default()
    }

    fn route_metadata<'a>(
        &'a self,
        of_service: impl FnOnce(&'a ServiceManifest) -> &'a CompactStringMap,
        of_route: impl FnOnce(&'a RouteState) -> &'a CompactStringMap,
    ) -> Option<&'a CompactStringMap> {
        match self.route.as_ref()?.owner {
            // An owned Route keeps no copy of its own: ten thousand copies of the Service's pairs would cost memory.
            ObjectOwner::Service => self.service.as_ref().map(|it| of_service(&it.manifest)),
            ObjectOwner::Unowned | ObjectOwner::Other => self.route.as_ref().map(of_route),
        }
    }

    /// Returns the Revision of this name.
    pub fn revision(&self, name: &str) -> Option<&AppRevision> {
        self.revisions.iter().find(|it| *it.name == *name)
    }

    /// Iterates over all pods, each with the Revision it serves.
    pub fn pods(&self) -> impl Iterator<Item = (&AppRevision, &RevisionPod)> {
        self.revisions.iter().flat_map(|it| it.pods.iter().map(move |pod| (it, pod)))
    }
}

/// A checked manifest of a Service.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceManifest {
    /// Labels of the Service.
    pub labels: CompactStringMap,
    /// Annotations of the Service.
    pub annotations: CompactStringMap,
    /// Name for the Revision as the user chose it (`spec.template.metadata.name`).
    pub revision_name: Option<Box<str>>,
    /// Template with defaults, as JSON. Service, Configuration and newest Revision share the text.
    pub template: Arc<str>,
    /// Traffic targets with defaults; their percents add up to 100. The Route shares them.
    pub traffic: Arc<[TrafficSpec]>,
}

/// One traffic target of the spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrafficSpec {
    /// Tag of the target, which is then also reachable as `<tag>-<route>`.
    pub tag: Option<Box<str>>,
    /// Name of a Revision; `None`: the latest ready one of the Configuration.
    pub revision_name: Option<Box<str>>,
    /// Name of the Configuration; `None`: the Configuration of the Route's own name.
    pub configuration_name: Option<Box<str>>,
    /// Share of the requests, in percent.
    pub percent: u8,
}

/// A Service as the controller knows it: the manifest in force and the object's state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceState {
    /// Metadata of the Service object.
    pub meta: ObjectMetaSummary,
    /// The last manifest that passed all checks; it is in force.
    pub manifest: ServiceManifest,
    /// The broken rules of the newest manifest, in one line; `None` while the newest manifest is in force.
    pub manifest_error: Option<Box<str>>,
    /// Write errors of the Service's child objects.
    pub write_errors: ServiceWriteErrors,
    /// True once the Service is being deleted. On the local node users no longer see it, and it ends when its pods have
    /// drained.
    pub is_terminating: bool,
}

/// Reasons why objects that a Service makes cannot be written. Only the leader knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceWriteErrors {
    /// Write error of the Configuration; `None` if there is none.
    pub configuration: Option<Box<ConditionReason>>,
    /// Write error of the Route; `None` if there is none.
    pub route: Option<Box<ConditionReason>>,
}

/// Owner of a Configuration or Route: the controller in its owner references.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ObjectOwner {
    /// The Service of the same name; its manifest is the source of the object's labels and annotations.
    #[default]
    Service,
    /// No owner: a user created the object.
    Unowned,
    /// Another controller, or a Service of another name.
    Other,
}

/// A Configuration: the newest template, which makes Revisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConfigurationState {
    /// Metadata of the Configuration object.
    pub meta: ObjectMetaSummary,
    /// Owner of the Configuration.
    pub owner: ObjectOwner,
    /// Name for the template's Revision as the user chose it.
    pub revision_name: Option<Box<str>>,
    /// Template with defaults, as JSON.
    pub template: Arc<str>,
    /// User that last changed the Configuration, and so created the Revision of its template.
    pub last_modifier: Option<Box<str>>,
    /// Name of the newest Revision that has ever been ready.
    pub latest_ready: Option<Box<str>>,
    /// Hash of the desired object last applied, where a Service of Kubernetes owns the Configuration.
    pub applied_hash: Option<u64>,
    /// True once the Configuration is being deleted: the controller makes nothing for it any more.
    pub is_terminating: bool,
}

/// A Route: a name, and the Revisions that share its requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteState {
    /// Metadata of the Route object.
    pub meta: ObjectMetaSummary,
    /// Owner of the Route.
    pub owner: ObjectOwner,
    /// Labels of the Route; empty if its owner is [`ObjectOwner::Service`], whose labels are used.
    pub labels: CompactStringMap,
    /// Annotations of the Route; empty if its owner is [`ObjectOwner::Service`], whose annotations are used.
    pub annotations: CompactStringMap,
    /// Traffic targets of the spec, with defaults.
    pub traffic_spec: Arc<[TrafficSpec]>,
    /// Allocations of the Route's own name and of its tags.
    pub allocations: Vec<RouteNameAllocation>,
    /// Traffic targets in force: the Revisions that get the requests now.
    pub traffic: Vec<AssignedTraffic>,
    /// State of a gradual rollout, while one lasts.
    pub rollout: Option<Box<Rollout>>,
    /// Class of another ingress that fronts the Route's public hosts; `None`: the gateway of Rouse serves them, also
    /// while another ingress is about to take them over.
    pub ingress_class: Option<Box<str>>,
    /// Reason why one of the Route's names is not available to it.
    pub blocked_reason: Option<Box<ConditionReason>>,
    /// Hash of the desired object last applied, where a Service of Kubernetes owns the Route.
    pub applied_hash: Option<u64>,
    /// True once the Route is being deleted: the controller makes nothing for it any more.
    pub is_terminating: bool,
}

impl RouteState {
    /// Iterates over the Route's tags: those of the spec, then those that still hold an allocation. Most come twice.
    pub fn tags(&self) -> impl Iterator<Item = &str> {
        // A removed tag holds its name until its allocation is released.
        let specified = self.traffic_spec.iter().filter_map(|it| it.tag.as_deref());
        specified.chain(self.allocations.iter().filter_map(|it| it.tag.as_deref()))
    }
}

/// Allocation of one name of a Route: the ClusterIPs and the port that it holds until it is deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteNameAllocation {
    /// Tag whose name holds the allocation; `None`: the Route's own name.
    pub tag: Option<Box<str>>,
    /// ClusterIPs of the name, or the number they are computed from.
    pub cluster_ips: ClusterIpSource,
    /// Port at the activators that identifies the name.
    pub activator_port: u16,
}

/// State of a placeholder, the Kubernetes Service that reserves a name of a Route.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaceholderState {
    /// ClusterIPs of the placeholder, IPv4 first.
    pub cluster_ips: Box<[IpAddr]>,
    /// Port of the name at the activators, once one is allocated.
    pub activator_port: Option<u16>,
    /// True if the visibility label keeps the name inside the cluster.
    pub is_cluster_local: bool,
    /// UID of the Route that owns the placeholder; 0 where none does.
    pub owner_uid: Uid,
    /// Creation time of the placeholder, by which the order of claims to its name is decided.
    pub created: UnixMillis,
    /// Time for which a client keeps its pod, as a user has set it; `None`: no affinity.
    pub affinity: Option<Duration>,
    /// Gateway port that the Route owns, as its annotation says. Users of the namespace may write it, so it counts only
    /// while no record of the owners is known.
    pub gateway_port: Option<NonZeroU16>,
}

/// Source of the ClusterIPs of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterIpSource {
    /// Last 16 bits of ClusterIPs from the local node's range, allocated by this controller.
    LocalRange(u16),
    /// ClusterIPs that the API server allocated; empty while there are none.
    ApiServer(Box<[IpAddr]>),
}

/// One traffic target in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssignedTraffic {
    /// Tag of the target, which is then also reachable as `<tag>-<route>`.
    pub tag: Option<Box<str>>,
    /// Name of the Revision that gets the requests.
    pub revision_name: Box<str>,
    /// True if the target follows the latest ready Revision.
    pub is_latest: bool,
    /// Share of the requests, in percent.
    pub percent: u8,
}
