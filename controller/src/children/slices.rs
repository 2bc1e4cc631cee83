//! Pure: the EndpointSlices of a Route's names: a few activators each, with the name's own port there. And that of a
//! Revision's own Service: its pods, or activators, which know it by the request's host.

use std::net::IpAddr;

use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        discovery::v1::{Endpoint, EndpointConditions, EndpointPort},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::json;

use super::{Object, Resource, Revision, child_name, meta, services::Placeholder, subset};

/// Who keeps the slice, for Kubernetes' own controllers to leave it alone.
pub const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
/// Us.
pub const MANAGER: &str = "rouse.dev";
/// Ends the name of a slice of IPv6 addresses. No Service's name has a dot, so it is no other's slice.
pub const V6: &str = ".v6";
/// The Service a slice belongs to.
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// Where an activator takes requests from inside the cluster, whichever service their host names.
pub const INSIDE: u16 = 8012;

/// A running activator, or a pod of a Revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activator {
    /// Its pod.
    pub pod: String,
    /// Its pod's namespace.
    pub namespace: String,
    /// The node it runs on.
    pub node: String,
    /// That node's zone; empty where nodes have none.
    pub zone: String,
    /// Its addresses, at most one a family.
    pub addresses: Vec<IpAddr>,
    /// Whether its pod is ready.
    pub ready: bool,
    /// Whether it is about to stop.
    pub leaving: bool,
}

/// Name of a slice of a Service, with [`V6`] or nothing behind.
pub fn name(service: &str, suffix: &str) -> String {
    child_name(service, suffix)
}

/// The slices of one name, one for each family in which any of its activators has an address: IPv4's is named as the
/// Service, IPv6's with [`V6`] behind.
///
/// The name chooses `count` of all activators that are ready and stay; 0 means all. A name is never left without: as
/// long as none is ready, those that are not stand in, and then those that are about to stop, of which the caller gives
/// only those that slices lead to already.
pub fn slices(of: &Placeholder<'_>, activators: &[Activator], count: usize) -> Vec<Object> {
    let chosen = chosen(&format!("{}/{}", of.namespace, of.name()), activators, count);
    let Some(port) = of.activator_port else { return Vec::new() };
    let families = [("IPv4", ""), ("IPv6", V6)];
    let slice = |(family, suffix): (&str, &str)| {
        let four = family == "IPv4";
        let endpoints: Vec<Endpoint> =
            chosen.iter().filter_map(|activator| endpoint(activator, four)).collect();
        (!endpoints.is_empty()).then(|| {
            let mut labels = of.labels();
            labels.insert(MANAGED_BY.into(), MANAGER.into());
            labels.insert(SERVICE_NAME.into(), of.name());
            let meta = ObjectMeta {
                name: Some(name(&of.name(), suffix)),
                namespace: Some(of.namespace.into()),
                labels: Some(labels),
                owner_references: Some(vec![of.owner().reference()]),
                ..ObjectMeta::default()
            };
            let port = EndpointPort {
                name: Some("http".into()),
                port: Some(port.into()),
                protocol: Some("TCP".into()),
                ..EndpointPort::default()
            };
            let rest = json!({"addressType": family, "endpoints": endpoints, "ports": [port]});
            Object::new(Resource::EndpointSlice, meta, rest)
        })
    };
    families.into_iter().filter_map(slice).collect()
}

/// The slice of a Revision's own Service: all of its ready pods; without any, `count` of the activators. One family is
/// enough for a Service that has one address.
pub fn of_revision(
    revision: &Revision<'_>,
    pods: &[Activator],
    port: u16,
    activators: &[Activator],
    count: usize,
) -> Option<Object> {
    let (backends, port) = match pods {
        [] => {
            let target = format!("{}/{}", revision.namespace, revision.name);
            (chosen(&target, activators, count), INSIDE)
        }
        pods => (pods.iter().collect(), port),
    };
    let four: Vec<Endpoint> = backends.iter().filter_map(|it| endpoint(it, true)).collect();
    let six = || backends.iter().filter_map(|it| endpoint(it, false)).collect();
    let (family, suffix, endpoints): (_, _, Vec<Endpoint>) =
        if four.is_empty() { ("IPv6", V6, six()) } else { ("IPv4", "", four) };
    if endpoints.is_empty() {
        return None;
    }
    let mut meta = meta::meta(revision, child_name(revision.name, suffix));
    let labels = meta.labels.get_or_insert_default();
    labels.insert(MANAGED_BY.into(), MANAGER.into());
    labels.insert(SERVICE_NAME.into(), revision.name.into());
    let port = EndpointPort {
        name: Some(if revision.h2c() { "http2" } else { "http" }.into()),
        app_protocol: revision.h2c().then(|| "kubernetes.io/h2c".into()),
        port: Some(port.into()),
        protocol: Some("TCP".into()),
    };
    let rest = json!({"addressType": family, "endpoints": endpoints, "ports": [port]});
    Some(Object::new(Resource::EndpointSlice, meta, rest))
}

fn chosen<'a>(target: &str, activators: &'a [Activator], count: usize) -> Vec<&'a Activator> {
    let staying = |it: &&Activator| !it.leaving && !it.addresses.is_empty();
    let mut able: Vec<&Activator> =
        activators.iter().filter(|it| it.ready).filter(staying).collect();
    if able.is_empty() {
        able = activators.iter().filter(staying).collect();
    }
    if able.is_empty() {
        // They serve until the last slice has left them; without a slice nobody would.
        able = activators.iter().filter(|it| !it.addresses.is_empty()).collect();
    }
    let names = able.iter().map(|it| it.pod.as_str());
    let count = if count == 0 { able.len() } else { count };
    let subset = subset::choose(names, count, target);
    able.retain(|it| subset.contains(it.pod.as_str()));
    able.sort_by(|a, b| a.pod.cmp(&b.pod));
    able
}

fn endpoint(activator: &Activator, four: bool) -> Option<Endpoint> {
    let address = activator.addresses.iter().find(|it| it.is_ipv4() == four)?;
    Some(Endpoint {
        addresses: vec![address.to_string()],
        conditions: Some(EndpointConditions {
            ready: Some(activator.ready),
            serving: Some(activator.ready),
            terminating: Some(activator.leaving),
        }),
        node_name: Some(activator.node.clone()).filter(|it| !it.is_empty()),
        zone: Some(activator.zone.clone()).filter(|it| !it.is_empty()),
        target_ref: Some(ObjectReference {
            kind: Some("Pod".into()),
            namespace: Some(activator.namespace.clone()),
            name: Some(activator.pod.clone()),
            ..ObjectReference::default()
        }),
        ..Endpoint::default()
    })
}
