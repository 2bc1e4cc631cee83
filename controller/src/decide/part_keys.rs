//! Pure: keys of the parts of an app's objects, and the app that an object belongs to.

use common::wire::NamespacedName;

use crate::{
    decide::plan::{self, ingresses, requested_certificates},
    model::{
        cluster_state::{
            AppRevision, AppState, ClusterState, ParsedTemplate, PodStage, RevisionPod,
            RouteNameAllocation, WorkloadKey, WorkloadKind, name_registry::PORT_RECORD_NAME,
        },
        knative::key,
        object::{
            ObjectPart, ObjectPartKey, PodRequests, ResourceKind,
            names::{self, tagged_name},
        },
        scale_policy::AutoscalerClass,
    },
};

/// Returns true if the Revision's Deployment is scaled: no owner of it is being deleted.
pub fn is_scaled(
    cluster: &ClusterState,
    name: &NamespacedName,
    app: &AppState,
    revision: &AppRevision,
) -> bool {
    // A Configuration that is deleted with `--cascade=orphan` leaves its Revisions behind.
    let is_kept = app.configuration.as_ref().map_or(revision.is_orphan, |it| !it.is_terminating);
    cluster.is_in_use(name, app) && is_kept
}

/// Returns the Revision that a child object of this name belongs to, with its app. Candidates are the apps whose names
/// begin the name.
pub(crate) fn find_owner_revision<'a>(
    cluster: &'a ClusterState,
    name: &NamespacedName,
    is_owner: impl Fn(&AppRevision) -> bool,
) -> Option<(NamespacedName, &'a AppRevision)> {
    let in_app = |app: NamespacedName| {
        let revisions = &cluster.apps.get(&app)?.revisions;
        revisions.iter().find(|it| is_owner(it)).map(|it| (app, it))
    };
    // Names are made of the app's name and suffixes, so every prefix up to a `-` may be the app's.
    let prefix_ends = name.name.match_indices('-').map(|(at, _)| at).chain([name.name.len()]);
    let mut apps =
        prefix_ends.map(|at| NamespacedName::new(name.namespace.clone(), &name.name[..at]));
    apps.find_map(in_app).or_else(|| cluster.exceptional_owners(name).cloned().find_map(in_app))
}

/// Returns the app and the Revision that an object is made for.
pub fn owner_revision_of(
    cluster: &ClusterState,
    key: &ObjectPartKey,
) -> Option<(NamespacedName, Box<str>)> {
    let revision =
        find_owner_revision(cluster, &key.name, |revision| has_child_named(cluster, key, revision));
    revision.map(|(owner, revision)| (owner, revision.name.clone()))
}

/// Returns true if one of the Revision's child objects has the name of this key.
pub(crate) fn has_child_named(
    cluster: &ClusterState,
    key: &ObjectPartKey,
    revision: &AppRevision,
) -> bool {
    let (revision_name, name) = (&*revision.name, key.name.name.as_str());
    // Objects of a user may have any of these names.
    if revision.is_scaled_service {
        return false;
    }
    match key.resource {
        ResourceKind::Deployment => names::deployment_name(revision_name) == name,
        ResourceKind::Image => container_names(revision, cluster)
            .iter()
            .any(|it| names::image_name(revision_name, it) == name),
        ResourceKind::Service => {
            revision_name == name || names::private_service_name(revision_name) == name
        }
        ResourceKind::EndpointSlice => {
            revision_name == name || names::slice_name(revision_name, names::V6_SUFFIX) == name
        }
        ResourceKind::Revision
        | ResourceKind::PodAutoscaler
        | ResourceKind::ServerlessService
        | ResourceKind::HorizontalPodAutoscaler
        | ResourceKind::Metric => revision_name == name,
        // No child objects: such an object may have a Revision's name and belong to another app.
        ResourceKind::KnativeService
        | ResourceKind::Configuration
        | ResourceKind::Route
        | ResourceKind::DomainMapping
        | ResourceKind::ClusterDomainClaim
        | ResourceKind::StatefulSet
        | ResourceKind::Pod
        | ResourceKind::Node
        | ResourceKind::ConfigMap
        | ResourceKind::Namespace
        | ResourceKind::NetworkPolicy
        | ResourceKind::RequestedCertificate
        | ResourceKind::IssuedCertificate
        | ResourceKind::AcmeChallenge
        | ResourceKind::ReferenceGrant
        | ResourceKind::GatewayClass
        | ResourceKind::Gateway
        | ResourceKind::HttpRoute
        | ResourceKind::GrpcRoute
        | ResourceKind::Ingress => false,
    }
}

/// Returns the Route that holds a name, with the name's allocation.
pub(crate) fn find_route_name<'a>(
    cluster: &'a ClusterState,
    name: &NamespacedName,
) -> Option<(NamespacedName, &'a RouteNameAllocation)> {
    let owner = cluster.app_of_route_name(name)?;
    let mut all = cluster.apps.get(&owner)?.allocations().iter();
    let allocation = all.find(|it| plan::placeholder_name(it, &owner.name) == name.name)?;
    Some((owner, allocation))
}

/// Returns the Route to one of whose names a slice belongs, with the name's allocation.
pub(crate) fn find_slice_route<'a>(
    cluster: &'a ClusterState,
    slice: &NamespacedName,
) -> Option<(NamespacedName, &'a RouteNameAllocation)> {
    let service = slice.name.strip_suffix(names::V6_SUFFIX).unwrap_or(&slice.name);
    let of = |app: &NamespacedName| {
        let mut all = cluster.apps.get(app)?.allocations().iter();
        let name = |allocation: &RouteNameAllocation| {
            names::slice_name(&plan::placeholder_name(allocation, &app.name), names::V6_SUFFIX)
        };
        all.find(|it| name(it) == slice.name).map(|it| (app.clone(), it))
    };
    // A long name is cut before the suffix is added, so it does not contain the Service's name as a whole.
    find_route_name(cluster, &NamespacedName::new(slice.namespace.clone(), service))
        .or_else(|| cluster.exceptional_owners(slice).find_map(of))
}

/// Returns the Route that a placeholder, a slice or an Ingress belongs to.
pub fn owner_route_of(cluster: &ClusterState, key: &ObjectPartKey) -> Option<NamespacedName> {
    match key.resource {
        ResourceKind::Service => cluster.app_of_route_name(&key.name),
        ResourceKind::EndpointSlice => find_slice_route(cluster, &key.name).map(|(route, _)| route),
        // An Ingress has the name of its Route.
        ResourceKind::Ingress => {
            let app = cluster.apps.get(&key.name)?;
            app.route.is_some().then(|| key.name.clone())
        }
        _ => None,
    }
}

/// Returns the keys of the slices of a Route's names.
pub fn slice_keys(name: &NamespacedName, app: &AppState) -> Vec<ObjectPartKey> {
    let of = |allocation: &RouteNameAllocation| {
        let service_name = plan::placeholder_name(allocation, &name.name);
        let key = |name: String, namespace: &str| {
            ObjectPartKey::new(
                ResourceKind::EndpointSlice,
                ObjectPart::Object,
                NamespacedName::new(namespace, name),
            )
        };
        [
            key(service_name.clone(), &name.namespace),
            key(names::slice_name(&service_name, names::V6_SUFFIX), &name.namespace),
        ]
    };
    app.allocations().iter().flat_map(of).collect()
}

/// Returns the keys of the statuses of Service, Configuration and Route.
pub fn status_keys(name: &NamespacedName) -> [ObjectPartKey; 3] {
    [ResourceKind::KnativeService, ResourceKind::Configuration, ResourceKind::Route]
        .map(|resource| ObjectPartKey::new(resource, ObjectPart::Status, name.clone()))
}

/// Returns the keys of all parts that change as a Revision scales.
pub fn scale_keys(namespace: &str, revision: &AppRevision) -> impl Iterator<Item = ObjectPartKey> {
    let name = |name: String| NamespacedName::new(namespace, name);
    let revision_name = || name(revision.name.to_string());
    [
        ObjectPartKey::new(
            ResourceKind::Deployment,
            ObjectPart::Scale,
            name(names::deployment_name(&revision.name)),
        ),
        ObjectPartKey::new(ResourceKind::Revision, ObjectPart::Status, revision_name()),
        ObjectPartKey::new(ResourceKind::PodAutoscaler, ObjectPart::Status, revision_name()),
    ]
    .into_iter()
    .chain(path_keys(namespace, revision))
}

/// Returns the keys that depend on the path of connections to a Revision: the ServerlessService, and the slices of the
/// Revision's own Service.
pub fn path_keys(namespace: &str, revision: &AppRevision) -> [ObjectPartKey; 4] {
    let name = |name: String| NamespacedName::new(namespace, name);
    let own = || name(revision.name.to_string());
    let ipv6_slice = || name(names::slice_name(&revision.name, names::V6_SUFFIX));
    [
        ObjectPartKey::new(ResourceKind::ServerlessService, ObjectPart::Object, own()),
        ObjectPartKey::new(ResourceKind::ServerlessService, ObjectPart::Status, own()),
        ObjectPartKey::new(ResourceKind::EndpointSlice, ObjectPart::Object, own()),
        ObjectPartKey::new(ResourceKind::EndpointSlice, ObjectPart::Object, ipv6_slice()),
    ]
}

/// Returns the keys of a Revision and of its child objects.
pub fn revision_keys(
    namespace: &str,
    revision: &AppRevision,
    containers: &[String],
) -> Vec<ObjectPartKey> {
    let key = |resource, name: String| {
        ObjectPartKey::new(resource, ObjectPart::Object, NamespacedName::new(namespace, name))
    };
    let revision_name = || revision.name.to_string();
    let mut all = vec![
        key(ResourceKind::Revision, revision_name()),
        key(ResourceKind::Deployment, names::deployment_name(&revision.name)),
        key(ResourceKind::PodAutoscaler, revision_name()),
        key(ResourceKind::ServerlessService, revision_name()),
        key(ResourceKind::Service, revision_name()),
        key(ResourceKind::Service, names::private_service_name(&revision.name)),
    ];
    let image = |it: &String| key(ResourceKind::Image, names::image_name(&revision.name, it));
    all.extend(containers.iter().map(image));
    all
}

/// Returns the key of a Revision's HorizontalPodAutoscaler, if it is of that class.
pub fn hpa_key(
    namespace: &str,
    revision: &AppRevision,
    cluster: &ClusterState,
) -> Option<ObjectPartKey> {
    let revision_name = NamespacedName::new(namespace, &*revision.name);
    let key = || {
        ObjectPartKey::new(ResourceKind::HorizontalPodAutoscaler, ObjectPart::Object, revision_name)
    };
    (ParsedTemplate::of_revision(revision, cluster).class == AutoscalerClass::Hpa).then(key)
}

/// Returns the keys of all objects and statuses of an app.
pub fn app_keys(
    name: &NamespacedName,
    app: &AppState,
    cluster: &ClusterState,
) -> Vec<ObjectPartKey> {
    let mut all = scaled_keys(name, app);
    // Without a Knative Service, objects of its names may belong to users.
    if !app.is_scaled_service_only() {
        all.extend(status_keys(name));
        all.extend(object_keys(name));
        all.extend(route_name_keys(name, app));
        all.extend(claimed_port_key(app, cluster));
        all.extend(certificate_keys(name, app, cluster));
        all.extend(ingress_key(name, app, cluster));
    }
    for revision in &app.revisions {
        all.extend(pod_annotation_keys(&name.namespace, revision));
        all.extend(resize_keys(&name.namespace, revision));
        if revision.is_scaled_service {
            continue;
        }
        // Earlier versions made a Metric, which must be removed.
        let revision_name = NamespacedName::new(name.namespace.clone(), &*revision.name);
        all.push(ObjectPartKey::new(ResourceKind::Metric, ObjectPart::Object, revision_name));
        all.extend(revision_keys(&name.namespace, revision, &container_names(revision, cluster)));
        all.extend(hpa_key(&name.namespace, revision, cluster));
        all.extend(scale_keys(&name.namespace, revision));
    }
    all
}

/// Returns the names of a Revision's containers, init containers first.
pub fn container_names(revision: &AppRevision, cluster: &ClusterState) -> Vec<String> {
    let template = ParsedTemplate::of_revision(revision, cluster);
    let pod = &template.raw.spec.pod;
    let all = pod.init_containers.iter().flatten().chain(&pod.containers);
    all.map(|it| it.name.clone()).collect()
}

/// Returns the keys of all parts that the controller writes for a scaled Service: its PodAutoscaler, its slices, and
/// the number of its workload's pods.
pub fn scaled_keys(name: &NamespacedName, app: &AppState) -> Vec<ObjectPartKey> {
    let Some(scaled) = &app.scaled else { return Vec::new() };
    let autoscaler = [ObjectPart::Object, ObjectPart::Status]
        .map(|part| ObjectPartKey::new(ResourceKind::PodAutoscaler, part, name.clone()));
    let slices = names::scaled_slice_names(&name.name).map(|slice| {
        let slice = NamespacedName::new(name.namespace.clone(), slice);
        ObjectPartKey::new(ResourceKind::EndpointSlice, ObjectPart::Object, slice)
    });
    let workload = scaled.binding.as_ref().map(|it| workload_key(&it.key));
    autoscaler.into_iter().chain(slices).chain(workload).collect()
}

/// Returns the scaled Service that a PodAutoscaler, a slice or a workload belongs to.
pub fn scaled_service_of(cluster: &ClusterState, key: &ObjectPartKey) -> Option<NamespacedName> {
    let service = match key.resource {
        ResourceKind::PodAutoscaler => key.name.clone(),
        ResourceKind::EndpointSlice => {
            let service = names::scaled_service_of_slice(&key.name.name)?;
            NamespacedName::new(key.name.namespace.clone(), service)
        }
        resource => {
            let kind = WorkloadKind::from_resource(resource)?;
            let workload = WorkloadKey { name: key.name.clone(), kind };
            return cluster.workloads.holder(&workload).cloned();
        }
    };
    cluster.apps.get(&service).is_some_and(|app| app.scaled.is_some()).then_some(service)
}

/// Returns the key of the number of a workload's pods.
pub fn workload_key(workload: &WorkloadKey) -> ObjectPartKey {
    ObjectPartKey::new(workload.kind.resource(), ObjectPart::Scale, workload.name.clone())
}

/// Returns the keys of the slices and of the ServerlessService on the path of connections to an app, if it has any.
pub fn app_path_keys(name: &NamespacedName, app: &AppState) -> Vec<ObjectPartKey> {
    let revisions = app.revisions.iter().filter(|it| !it.is_scaled_service);
    let paths = revisions.flat_map(|it| path_keys(&name.namespace, it));
    paths.chain(scaled_keys(name, app)).collect()
}

/// Returns the keys of an app's Configuration and Route.
pub fn object_keys(name: &NamespacedName) -> [ObjectPartKey; 2] {
    [ResourceKind::Configuration, ResourceKind::Route]
        .map(|resource| ObjectPartKey::new(resource, ObjectPart::Object, name.clone()))
}

/// Returns the keys of the placeholders and slices of a Route's names.
pub fn route_name_keys(name: &NamespacedName, app: &AppState) -> Vec<ObjectPartKey> {
    let service = |allocation: &RouteNameAllocation| {
        let route_name = NamespacedName::new(
            name.namespace.clone(),
            plan::placeholder_name(allocation, &name.name),
        );
        ObjectPartKey::new(ResourceKind::Service, ObjectPart::Object, route_name)
    };
    app.allocations().iter().map(service).chain(slice_keys(name, app)).collect()
}

/// Returns the key of the record of the owners of gateway ports.
pub fn port_record_key(cluster: &ClusterState) -> ObjectPartKey {
    let name = NamespacedName::new(cluster.settings.system_namespace.as_str(), PORT_RECORD_NAME);
    ObjectPartKey::new(ResourceKind::ConfigMap, ObjectPart::Object, name)
}

/// Returns the key of that record, if an app's Route asks for a gateway port.
pub fn claimed_port_key(app: &AppState, cluster: &ClusterState) -> Option<ObjectPartKey> {
    app.route_annotation(key::GATEWAY_PORT).map(|_| port_record_key(cluster))
}

/// Returns the keys of the requested certificates of a Route's names, if there may be any.
pub fn certificate_keys(
    name: &NamespacedName,
    app: &AppState,
    cluster: &ClusterState,
) -> Vec<ObjectPartKey> {
    let route = app.route.as_ref().filter(|it| it.meta.exists());
    let Some(route) = route.filter(|_| requested_certificates::is_enabled(cluster)) else {
        return Vec::new();
    };
    let certificate = |tag: Option<&str>| {
        let certificate = requested_certificates::route_certificate_name(route.meta.uid, tag);
        request_keys(&NamespacedName::new(name.namespace.clone(), certificate))
    };
    let tags = app.traffic().iter().filter_map(|it| it.tag.as_deref()).map(Some);
    [None].into_iter().chain(tags).flat_map(certificate).collect()
}

/// Returns the key of the Ingress of a Route, if there is one or should be. After a failed write of one that is no longer
/// wanted, the key ends the failure.
pub fn ingress_key(
    name: &NamespacedName,
    app: &AppState,
    cluster: &ClusterState,
) -> Option<ObjectPartKey> {
    let all = &cluster.ingresses;
    let is_wanted = ingresses::wanted_class(app, cluster).is_some();
    let is_blocked = app.route.as_ref().is_some_and(|it| it.blocked_reason.is_some());
    let is_due = is_wanted || is_blocked || all.by_name.contains_key(name);
    let key = || ObjectPartKey::new(ResourceKind::Ingress, ObjectPart::Object, name.clone());
    (all.is_listed && is_due).then(key)
}

/// Returns the keys of all parts that the controller writes for a requested certificate.
pub fn request_keys(certificate: &NamespacedName) -> [ObjectPartKey; 3] {
    let key = |resource, part| ObjectPartKey::new(resource, part, certificate.clone());
    [
        key(ResourceKind::RequestedCertificate, ObjectPart::Object),
        key(ResourceKind::RequestedCertificate, ObjectPart::Status),
        key(ResourceKind::IssuedCertificate, ObjectPart::Object),
    ]
}

/// Returns names of an app's objects that do not begin with the app's name: they were cut to fit, or chosen by the
/// user.
pub fn owner_exceptions(
    name: &NamespacedName,
    app: &AppState,
    cluster: &ClusterState,
) -> Vec<NamespacedName> {
    let begins_with_app =
        |it: &str| it.strip_prefix(&*name.name).is_some_and(|rest| rest.starts_with('-'));
    let revisions = app.revisions.iter().filter(|it| !it.is_scaled_service);
    let children = revisions.flat_map(|revision| {
        let all = revision_keys(&name.namespace, revision, &container_names(revision, cluster));
        let path_keys = path_keys(&name.namespace, revision);
        all.into_iter().chain(path_keys).map(|key| key.name).filter(|it| !begins_with_app(&it.name))
    });
    let mut exceptions: Vec<NamespacedName> = children.collect();
    let tags = app.route.iter().flat_map(|it| it.tags().map(Some).chain([None]));
    for tag in tags {
        let service = tagged_name(tag, &name.name);
        let slice = names::slice_name(&service, names::V6_SUFFIX);
        let full = |object_name: String| NamespacedName::new(name.namespace.as_str(), object_name);
        // A name that was cut does not contain the app's name as a whole.
        if slice.strip_suffix(names::V6_SUFFIX) != Some(service.as_str()) {
            exceptions.push(full(slice));
        }
        if tag.is_some_and(|tag| service.len() != tag.len() + 1 + name.name.len()) {
            exceptions.push(full(service));
        }
    }
    exceptions
}

/// Returns the keys of a Revision's pods whose annotations differ from their stage and their standby order.
pub fn pod_annotation_keys<'a>(
    namespace: &'a str,
    revision: &'a AppRevision,
) -> impl Iterator<Item = ObjectPartKey> + 'a {
    let is_outdated = |pod: &&RevisionPod| {
        // A pod that ends needs no annotation any more.
        let status = pod.kube_status.as_ref().filter(|it| !it.is_terminating);
        status.is_some_and(|it| {
            it.draining_since.is_some() != (pod.stage != PodStage::Serving)
                || it.standby_since.is_some() != pod.has_standby_order()
        })
    };
    let pods = revision.pods.iter().filter(is_outdated);
    pods.map(move |pod| {
        ObjectPartKey::new(
            ResourceKind::Pod,
            ObjectPart::Object,
            NamespacedName::new(namespace, &*pod.name),
        )
    })
}

/// Returns the keys of the requests of a Revision's pods that are reduced, or should be.
pub fn resize_keys<'a>(
    namespace: &'a str,
    revision: &'a AppRevision,
) -> impl Iterator<Item = ObjectPartKey> + 'a {
    let is_concerned = |pod: &&RevisionPod| {
        let is_noted = pod.kube_status.as_ref().is_some_and(|it| it.has_reduced_requests);
        let requests = pod.resize.as_ref().map(|it| it.requests);
        requests.is_some_and(|it| is_noted || it != PodRequests::Original)
    };
    let pods = revision.pods.iter().filter(is_concerned);
    pods.map(move |pod| {
        let name = NamespacedName::new(namespace, &*pod.name);
        ObjectPartKey::new(ResourceKind::Pod, ObjectPart::Resize, name)
    })
}
