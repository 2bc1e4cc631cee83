//! Pure: from objects of the Kubernetes API to the types that routing needs.

use std::{
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU16,
    time::Duration,
};

use k8s_openapi::{
    api::{
        core::v1::{Service, ServicePort},
        discovery::v1::{Endpoint, EndpointPort, EndpointSlice},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use smol_str::SmolStr;

use super::{
    AddressFamily, ClusterIpPort, ClusterIpService, InternalTrafficPolicy, ServiceEndpoint,
    ServiceSlice, ServiceSlicePort, TransportProtocol,
};
use crate::decimal::parse_digits;

/// Label of Services and EndpointSlices that another service proxy serves. Its value does not matter.
const SERVICE_PROXY_LABEL: &str = "service.kubernetes.io/service-proxy-name";
/// Label of EndpointSlices of headless Services, and of Services that ask to be left alone.
const HEADLESS_LABEL: &str = "service.kubernetes.io/headless";
/// Timeout of `sessionAffinity: ClientIP` without a stated one: three hours, the API server's default.
const DEFAULT_AFFINITY_TIMEOUT: Duration = Duration::from_secs(10_800);

/// Field of a Service or EndpointSlice with a value that Kubernetes does not allow. Routing ignores the port or endpoint
/// that has the field, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value:?} and is ignored: it must be {expected}")]
pub struct ServiceDecodeError {
    /// Path of the field.
    pub field: &'static str,
    /// Value found there.
    pub value: String,
    /// Values that the field may have.
    pub expected: &'static str,
}

impl ClusterIpService {
    /// Returns the routed part of a Service, and appends each ignored field to `errors`.
    ///
    /// `None` if a service proxy ignores the Service: a headless one, one without address, one of type `ExternalName`,
    /// or one that a label reserves for another proxy.
    pub fn from_kubernetes(
        service: &Service,
        errors: &mut Vec<ServiceDecodeError>,
    ) -> Option<Self> {
        let spec = service.spec.as_ref()?;
        if is_left_to_others(&service.metadata) || spec.type_.as_deref() == Some("ExternalName") {
            return None;
        }
        // API servers before dual stack set the single address only.
        let all = spec.cluster_ips.as_deref().unwrap_or_default();
        let all = if all.is_empty() { spec.cluster_ip.as_slice() } else { all };
        let stated = all.iter().filter(|ip| !ip.is_empty() && *ip != "None");
        let cluster_ips = stated.map(|ip| parse_address("spec.clusterIPs", ip));
        let cluster_ips: Vec<IpAddr> = keep_valid(cluster_ips, errors);
        if cluster_ips.is_empty() {
            return None;
        }
        // A timeout that is stated without the affinity has no effect.
        let is_sticky = spec.session_affinity.as_deref() == Some("ClientIP");
        let stated_timeout = spec.session_affinity_config.as_ref().and_then(|it| {
            u64::try_from(it.client_ip.as_ref()?.timeout_seconds?).ok().map(Duration::from_secs)
        });
        Some(Self {
            cluster_ips,
            ports: keep_valid(spec.ports.iter().flatten().map(decode_service_port), errors),
            internal_traffic_policy: match spec.internal_traffic_policy.as_deref() {
                Some("Local") => InternalTrafficPolicy::Local,
                _ => InternalTrafficPolicy::Cluster,
            },
            affinity_timeout: is_sticky.then(|| stated_timeout.unwrap_or(DEFAULT_AFFINITY_TIMEOUT)),
        })
    }
}

impl ServiceSlice {
    /// Returns the routed part of an EndpointSlice, and appends each ignored field to `errors`.
    ///
    /// `None` if a service proxy ignores the slice: one of host names, one of a headless Service, or one that a label
    /// reserves for another proxy.
    pub fn from_kubernetes(
        slice: &EndpointSlice,
        errors: &mut Vec<ServiceDecodeError>,
    ) -> Option<Self> {
        let family = match slice.address_type.as_str() {
            "IPv4" => AddressFamily::V4,
            "IPv6" => AddressFamily::V6,
            _ => return None,
        };
        if is_left_to_others(&slice.metadata) {
            return None;
        }
        let ports = slice.ports.iter().flatten().filter_map(|it| decode_slice_port(it).transpose());
        let endpoints = slice.endpoints.iter().flatten();
        let endpoints = endpoints.filter_map(|it| decode_endpoint(it, family).transpose());
        Some(Self {
            family,
            ports: keep_valid(ports, errors),
            endpoints: keep_valid(endpoints, errors),
        })
    }
}

/// Collects the valid items, and appends the errors of all others to `errors`.
fn keep_valid<T, C: FromIterator<T>>(
    items: impl Iterator<Item = Result<T, ServiceDecodeError>>,
    errors: &mut Vec<ServiceDecodeError>,
) -> C {
    items.filter_map(|item| item.map_err(|error| errors.push(error)).ok()).collect()
}

/// Returns true if a label tells service proxies to ignore an object.
fn is_left_to_others(meta: &ObjectMeta) -> bool {
    let labels = meta.labels.iter().flatten();
    labels.into_iter().any(|(key, _)| key == SERVICE_PROXY_LABEL || key == HEADLESS_LABEL)
}

fn decode_service_port(port: &ServicePort) -> Result<ClusterIpPort, ServiceDecodeError> {
    Ok(ClusterIpPort {
        name: port.name.as_deref().unwrap_or_default().into(),
        protocol: decode_protocol("spec.ports[].protocol", port.protocol.as_deref())?,
        port: parse_port("spec.ports[].port", port.port)?,
    })
}

/// Decodes a port of an EndpointSlice; `None` if it has no name or no number.
fn decode_slice_port(port: &EndpointPort) -> Result<Option<ServiceSlicePort>, ServiceDecodeError> {
    let (Some(name), Some(number)) = (&port.name, port.port.filter(|&it| it != 0)) else {
        return Ok(None);
    };
    Ok(Some(ServiceSlicePort {
        name: name.into(),
        protocol: decode_protocol("ports[].protocol", port.protocol.as_deref())?,
        port: parse_port("ports[].port", number)?,
    }))
}

/// Decodes an endpoint of a slice of this family; `None` if it has no address.
fn decode_endpoint(
    endpoint: &Endpoint,
    family: AddressFamily,
) -> Result<Option<ServiceEndpoint>, ServiceDecodeError> {
    let Some(address) = endpoint.addresses.first() else { return Ok(None) };
    let conditions = endpoint.conditions.as_ref();
    // What is not stated counts as ready and serving, as in kube-proxy.
    let condition = |stated: Option<bool>, default| stated.unwrap_or(default);
    let hints = endpoint.hints.as_ref();
    let zones = hints.and_then(|it| it.for_zones.as_deref()).unwrap_or_default();
    let nodes = hints.and_then(|it| it.for_nodes.as_deref()).unwrap_or_default();
    Ok(Some(ServiceEndpoint {
        address: parse_endpoint_address(address, family)?,
        is_ready: condition(conditions.and_then(|it| it.ready), true),
        is_serving: condition(conditions.and_then(|it| it.serving), true),
        is_terminating: condition(conditions.and_then(|it| it.terminating), false),
        node: endpoint.node_name.as_deref().unwrap_or_default().into(),
        zone: endpoint.zone.as_deref().unwrap_or_default().into(),
        zone_hints: zones.iter().map(|it| SmolStr::from(&it.name)).collect(),
        node_hints: nodes.iter().map(|it| SmolStr::from(&it.name)).collect(),
    }))
}

fn decode_protocol(
    field: &'static str,
    protocol: Option<&str>,
) -> Result<TransportProtocol, ServiceDecodeError> {
    match protocol {
        None | Some("" | "TCP") => Ok(TransportProtocol::Tcp),
        Some("UDP") => Ok(TransportProtocol::Udp),
        Some("SCTP") => Ok(TransportProtocol::Sctp),
        Some(other) => {
            Err(ServiceDecodeError { field, value: other.to_owned(), expected: "TCP, UDP or SCTP" })
        }
    }
}

fn parse_port(field: &'static str, number: i32) -> Result<NonZeroU16, ServiceDecodeError> {
    let port = u16::try_from(number).ok().and_then(NonZeroU16::new);
    port.ok_or_else(|| ServiceDecodeError {
        field,
        value: number.to_string(),
        expected: "a number from 1 to 65535",
    })
}

/// Parses an address as Kubernetes does: an IPv4 address may have leading zeros, and a mapped one is IPv4.
fn parse_address(field: &'static str, text: &str) -> Result<IpAddr, ServiceDecodeError> {
    let address = text.parse::<IpAddr>().ok().or_else(|| parse_padded_ipv4(text).map(IpAddr::V4));
    address.map(|it| it.to_canonical()).ok_or_else(|| ServiceDecodeError {
        field,
        value: text.to_owned(),
        expected: "an IP address",
    })
}

/// Parses the address of an endpoint. An address of the other family is an error, as kube-proxy ignores it: sockets of
/// the slice's own family cannot connect to it.
fn parse_endpoint_address(text: &str, family: AddressFamily) -> Result<IpAddr, ServiceDecodeError> {
    let field = "endpoints[].addresses[0]";
    let address = parse_address(field, text)?;
    let expected = match family {
        AddressFamily::V4 => "an IPv4 address, as addressType says",
        AddressFamily::V6 => "an IPv6 address, as addressType says",
    };
    match AddressFamily::of(address) == family {
        true => Ok(address),
        false => Err(ServiceDecodeError { field, value: text.to_owned(), expected }),
    }
}

/// Parses an IPv4 address whose decimal numbers have leading zeros. Objects from before Kubernetes 1.36 may have them.
fn parse_padded_ipv4(text: &str) -> Option<Ipv4Addr> {
    let numbers = text.split('.').map(parse_digits).collect::<Option<Vec<u8>>>()?;
    <[u8; 4]>::try_from(numbers).ok().map(Ipv4Addr::from)
}
