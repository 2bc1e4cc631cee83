//! Pure: EndpointSlices. Those of a Route's names list a few activators, with the name's own port there. That of a
//! Revision's own Service lists its pods, or activators, which choose the Revision by the request's host. Those of a
//! scaled Service list activators, with one port for each of its own.

use std::{net::IpAddr, num::NonZeroU16};

use common::{service_routing::TopologyHints, wire::AppProtocol};
use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        discovery::v1::{Endpoint, EndpointConditions, EndpointHints, EndpointPort, ForZone},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::json;

use super::{
    ChildObject, OwnerObject, RevisionView, meta,
    services::{self, PlaceholderSpec},
    subset,
};
use crate::{
    decide::topology_hints::{self, EndpointPlace, HintRules},
    model::object::{
        ResourceKind,
        names::{V6_SUFFIX, scaled_slice_names, slice_name},
    },
};

/// Label with the owner of a slice, so that Kubernetes' own controllers leave it alone.
pub const MANAGED_BY_LABEL: &str = "endpointslice.kubernetes.io/managed-by";
/// Value of [`MANAGED_BY_LABEL`] on Rouse's slices.
pub const MANAGED_BY_ROUSE: &str = "rouse.dev";

/// Label with the Service that a slice belongs to.
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";

/// Port of an activator for requests from inside the cluster, which name their service by the host.
pub const INTERNAL_PORT: u16 = 8012;

/// An endpoint of a slice: a running activator, or a pod of a Revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// Name of the pod.
    pub pod: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the node it runs on.
    pub node: String,
    /// Zone of the node; empty where nodes have none.
    pub zone: String,
    /// Addresses of the pod, at most one a family.
    pub addresses: Vec<IpAddr>,
    /// True if the pod is ready.
    pub ready: bool,
    /// True if the pod is about to stop.
    pub terminating: bool,
    /// Clients that should use the pod. Activators get theirs when a slice has chosen them.
    pub hints: TopologyHints,
}

/// Builds the slices of one name, one for each family in which an activator has an address. The IPv4 slice has the
/// Service's name, the IPv6 slice the suffix [`V6_SUFFIX`].
///
/// In each family the name chooses `count` of the activators that have an address of it, are ready and stay; 0 means
/// all. Where all activators have both families, both slices list the same ones. A name always has activators: while
/// none is ready, the others are used, and after them those about to stop. Of these the caller passes only the ones
/// that slices already list. `rules` are for the hints of the activators.
pub fn route_name_slices(
    of: &PlaceholderSpec<'_>,
    activators: &[SliceEndpoint],
    count: usize,
    rules: HintRules<'_>,
) -> Vec<ChildObject> {
    let target = format!("{}/{}", of.namespace, of.name());
    // Without a port the activators could not tell which service a connection is for.
    let Some(port) = of.activator_port else { return Vec::new() };
    let slice = |(family, suffix): (IpFamily, &str)| {
        let usable = usable_activators(activators.iter().filter(|it| family.is_of(it)));
        let chosen = choose_activators(&target, usable, count);
        let hints = activator_hints(&chosen, rules);
        let meta = ObjectMeta {
            name: Some(slice_name(&of.name(), suffix)),
            namespace: Some(of.namespace.into()),
            labels: Some(of.labels()),
            owner_references: Some(vec![of.owner().to_owner_reference()]),
            ..ObjectMeta::default()
        };
        let http = EndpointPort {
            name: Some("http".into()),
            app_protocol: of.app_protocol().map(Into::into),
            port: Some(port.into()),
            protocol: Some("TCP".into()),
        };
        // At one port, activators tell both by the first byte of a connection.
        let https = of.serves_local_tls.then(|| EndpointPort {
            name: Some(services::HTTPS_PORT_NAME.into()),
            app_protocol: None,
            ..http.clone()
        });
        let ports: Vec<EndpointPort> = [Some(http), https].into_iter().flatten().collect();
        slice_object(meta, &of.name(), family, to_endpoints(&chosen, &hints, family), &ports)
    };
    FAMILIES.into_iter().filter_map(slice).collect()
}

/// Builds the slices of a Revision's own Service, one for each family in which a pod or activator has an address.
///
/// In each family the slice lists all `pods` that serve in it, or without any `count` of the activators: kube-proxy
/// reads only the slices of the families in which the Service has a ClusterIP, and the cluster chooses these. A
/// Revision that speaks raw TCP has no slice without pods, since no host would tell activators the Revision.
pub fn revision_slices(
    revision: &RevisionView<'_>,
    pods: &[SliceEndpoint],
    port: u16,
    activators: &[SliceEndpoint],
    count: usize,
    rules: HintRules<'_>,
) -> Vec<ChildObject> {
    let target = format!("{}/{}", revision.namespace, revision.name);
    let protocol = revision.protocol();
    let activators: &[SliceEndpoint] = if protocol == AppProtocol::Tcp { &[] } else { activators };
    let slice = |(family, suffix): (IpFamily, &str)| {
        let serving: Vec<&SliceEndpoint> = pods.iter().filter(|it| family.is_of(it)).collect();
        let (backends, hints, port) = if serving.is_empty() {
            let usable = usable_activators(activators.iter().filter(|it| family.is_of(it)));
            let chosen = choose_activators(&target, usable, count);
            let hints = activator_hints(&chosen, rules);
            // Activators know a Revision only by the request's host, so they are addressed at the common port.
            (chosen, hints, INTERNAL_PORT)
        } else {
            let hints = serving.iter().map(|it| it.hints.clone()).collect();
            (serving, hints, port)
        };
        let port = EndpointPort {
            name: Some(services::port_name(protocol).into()),
            app_protocol: services::app_protocol(protocol).map(Into::into),
            port: Some(port.into()),
            protocol: Some("TCP".into()),
        };
        let meta = meta::child_meta(revision, slice_name(revision.name, suffix));
        let endpoints = to_endpoints(&backends, &hints, family);
        slice_object(meta, revision.name, family, endpoints, &[port])
    };
    FAMILIES.into_iter().filter_map(slice).collect()
}

/// Slices of a scaled Service.
#[derive(Clone, Debug)]
pub struct ScaledSlicesSpec<'a> {
    /// Namespace of the Service.
    pub namespace: &'a str,
    /// Name of the Service.
    pub service: &'a str,
    /// The Service as the owner of its slices.
    pub owner: OwnerObject<'a>,
    /// TCP ports of the Service: name, port at the activators, and protocol.
    pub ports: Vec<(&'a str, NonZeroU16, AppProtocol)>,
}

/// Builds the slices by which kube-proxy leads connections to a scaled Service to `count` of the activators; 0 means
/// all. There is one for each family in which an activator has an address. kube-proxy finds ports by their names.
pub fn scaled_service_slices(
    of: &ScaledSlicesSpec<'_>,
    activators: &[SliceEndpoint],
    count: usize,
    rules: HintRules<'_>,
) -> Vec<ChildObject> {
    if of.ports.is_empty() {
        return Vec::new();
    }
    let target = format!("{}/{}", of.namespace, of.service);
    let port = |(name, port, protocol): &(&str, NonZeroU16, AppProtocol)| EndpointPort {
        name: Some((*name).into()),
        app_protocol: services::app_protocol(*protocol).map(Into::into),
        port: Some(port.get().into()),
        protocol: Some("TCP".into()),
    };
    let ports: Vec<EndpointPort> = of.ports.iter().map(port).collect();
    let names = scaled_slice_names(of.service);
    let slice = |((family, _), name): ((IpFamily, &str), String)| {
        // Each family has its own choice, since an activator may lack an address of one.
        let usable = usable_activators(activators.iter().filter(|it| family.is_of(it)));
        let chosen = choose_activators(&target, usable, count);
        let hints = activator_hints(&chosen, rules);
        let meta = ObjectMeta {
            name: Some(name),
            namespace: Some(of.namespace.into()),
            owner_references: Some(vec![of.owner.to_weak_owner_reference()]),
            ..ObjectMeta::default()
        };
        slice_object(meta, of.service, family, to_endpoints(&chosen, &hints, family), &ports)
    };
    FAMILIES.into_iter().zip(names).filter_map(slice).collect()
}

/// Builds a slice of the Service with this name; `None` without endpoints. `meta` lacks the labels of a slice.
fn slice_object(
    mut meta: ObjectMeta,
    service: &str,
    family: IpFamily,
    endpoints: Vec<Endpoint>,
    ports: &[EndpointPort],
) -> Option<ChildObject> {
    if endpoints.is_empty() {
        return None;
    }
    let labels = meta.labels.get_or_insert_default();
    labels.insert(MANAGED_BY_LABEL.into(), MANAGED_BY_ROUSE.into());
    labels.insert(SERVICE_NAME_LABEL.into(), service.into());
    let rest = json!({"addressType": family.name(), "endpoints": endpoints, "ports": ports});
    Some(ChildObject::new(ResourceKind::EndpointSlice, meta, rest))
}

/// Returns the activators that names may use.
fn usable_activators<'a>(
    activators: impl Iterator<Item = &'a SliceEndpoint>,
) -> Vec<&'a SliceEndpoint> {
    let all: Vec<&SliceEndpoint> = activators.filter(|it| !it.addresses.is_empty()).collect();
    let staying: Vec<&SliceEndpoint> = all.iter().copied().filter(|it| !it.terminating).collect();
    let ready: Vec<&SliceEndpoint> = staying.iter().copied().filter(|it| it.ready).collect();
    // Stopping activators serve until no slice lists them; without a slice, no client would reach the service.
    [ready, staying].into_iter().find(|it| !it.is_empty()).unwrap_or(all)
}

/// Chooses the activators that a name uses: a subset of the usable ones, sorted by pod.
fn choose_activators<'a>(
    target: &str,
    mut usable: Vec<&'a SliceEndpoint>,
    count: usize,
) -> Vec<&'a SliceEndpoint> {
    let names = usable.iter().map(|it| it.pod.as_str());
    let count = if count == 0 { usable.len() } else { count };
    let subset = subset::choose_subset(names, count, target);
    usable.retain(|it| subset.contains(it.pod.as_str()));
    // A stable order: otherwise an equal slice would be written again.
    usable.sort_by(|a, b| a.pod.cmp(&b.pod));
    usable
}

/// Returns the hints of the activators that a slice has chosen. As in Kubernetes, only ready endpoints have hints.
fn activator_hints(chosen: &[&SliceEndpoint], rules: HintRules<'_>) -> Vec<TopologyHints> {
    let place = |it: &&SliceEndpoint| EndpointPlace {
        zone: it.zone.as_str().into(),
        node: it.node.as_str().into(),
    };
    let places: Vec<EndpointPlace> = chosen.iter().map(place).collect();
    let assigned = topology_hints::assign_hints(rules, &places).ok();
    let assigned = assigned.filter(|_| chosen.iter().all(|it| it.ready));
    assigned.unwrap_or_else(|| vec![TopologyHints::default(); chosen.len()])
}

/// Families with the suffix of their slice's name. A slice has one address type, so each family has a slice of its own.
const FAMILIES: [(IpFamily, &str); 2] = [(IpFamily::V4, ""), (IpFamily::V6, V6_SUFFIX)];

/// Address family of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IpFamily {
    V4,
    V6,
}

impl IpFamily {
    fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Returns true if the endpoint has an address of this family.
    fn is_of(self, endpoint: &SliceEndpoint) -> bool {
        endpoint.addresses.iter().any(|it| Self::of(*it) == self)
    }

    /// Value of the slice's field `addressType`.
    fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

/// Returns the endpoints of a slice of this family, each with its hints.
fn to_endpoints(
    backends: &[&SliceEndpoint],
    hints: &[TopologyHints],
    family: IpFamily,
) -> Vec<Endpoint> {
    let pairs = backends.iter().zip(hints);
    pairs.filter_map(|(it, hints)| to_endpoint(it, hints, family)).collect()
}

/// Returns the endpoint with its address of this family; `None`: it has none.
fn to_endpoint(
    endpoint: &SliceEndpoint,
    hints: &TopologyHints,
    family: IpFamily,
) -> Option<Endpoint> {
    let address = endpoint.addresses.iter().find(|it| IpFamily::of(**it) == family)?;
    // Hints for nodes are not written: API servers before Kubernetes 1.33 refuse a slice with that field.
    let for_zones =
        (!hints.zone.is_empty()).then(|| vec![ForZone { name: hints.zone.to_string() }]);
    Some(Endpoint {
        addresses: vec![address.to_string()],
        conditions: Some(EndpointConditions {
            ready: Some(endpoint.ready),
            // kube-proxy falls back on endpoints that serve while they terminate.
            serving: Some(endpoint.ready),
            terminating: Some(endpoint.terminating),
        }),
        node_name: Some(endpoint.node.clone()).filter(|it| !it.is_empty()),
        zone: Some(endpoint.zone.clone()).filter(|it| !it.is_empty()),
        target_ref: Some(ObjectReference {
            kind: Some("Pod".into()),
            namespace: Some(endpoint.namespace.clone()),
            name: Some(endpoint.pod.clone()),
            ..ObjectReference::default()
        }),
        hints: for_zones
            .map(|it| EndpointHints { for_zones: Some(it), ..EndpointHints::default() }),
        ..Endpoint::default()
    })
}
