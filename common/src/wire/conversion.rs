//! Pure: conversion from protobuf to checked types and back.
//!
//! A refused item names field, value and rule. The receiver logs and drops the item and continues, since one bad
//! subject must not stop the others.

use super::*;

mod certificates;
mod client_auth;
mod gateway_hosts;
mod pod_reports;
mod pods;
mod routes;
mod scale_policy;
mod settings;
mod slots;
mod standby;
mod telemetry;
mod usage;

/// Error of a message that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("field {field} is {value:?}: {rule}")]
pub struct WireError {
    field: &'static str,
    value: String,
    rule: &'static str,
}

impl WireError {
    /// Builds the error for `value` in `field`, which must obey `rule`.
    pub fn new(field: &'static str, value: impl fmt::Display, rule: &'static str) -> Self {
        Self { field, value: value.to_string(), rule }
    }
}

type WireResult<T> = Result<T, WireError>;

fn require<T>(field: &'static str, value: Option<T>) -> WireResult<T> {
    value.ok_or_else(|| WireError::new(field, "", "must be set"))
}

fn require_nonempty(field: &'static str, value: String) -> WireResult<String> {
    if value.is_empty() { Err(WireError::new(field, "", "must not be empty")) } else { Ok(value) }
}

fn parse_port(field: &'static str, value: u32) -> WireResult<NonZeroU16> {
    let checked = u16::try_from(value).ok().and_then(NonZeroU16::new);
    checked.ok_or_else(|| WireError::new(field, value, "must be a port, 1 to 65535"))
}

/// Parses a port that may be absent, which is sent as 0.
fn parse_optional_port(field: &'static str, value: u32) -> WireResult<Option<NonZeroU16>> {
    let port = u16::try_from(value);
    let port = port.map_err(|_large| WireError::new(field, value, "must be a port, or 0"))?;
    Ok(NonZeroU16::new(port))
}

fn parse_address(field: &'static str, bytes: &[u8]) -> WireResult<IpAddr> {
    if let Ok(four) = <[u8; 4]>::try_from(bytes) {
        return Ok(IpAddr::from(four));
    }
    let sixteen = <[u8; 16]>::try_from(bytes).ok();
    sixteen
        .map(IpAddr::from)
        .ok_or_else(|| WireError::new(field, bytes.len(), "must have 4 or 16 bytes"))
}

/// Parses an address that may be absent, which is sent as no bytes.
fn parse_optional_address(field: &'static str, bytes: &[u8]) -> WireResult<Option<IpAddr>> {
    if bytes.is_empty() { Ok(None) } else { parse_address(field, bytes).map(Some) }
}

fn parse_addresses(field: &'static str, all: &[Vec<u8>]) -> WireResult<Vec<IpAddr>> {
    all.iter().map(|bytes| parse_address(field, bytes)).collect()
}

fn address_octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(four) => four.octets().to_vec(),
        IpAddr::V6(six) => six.octets().to_vec(),
    }
}

fn parse_socket_address(
    field: &'static str,
    bytes: &[u8],
    at: u32,
) -> WireResult<Option<SocketAddr>> {
    if bytes.is_empty() {
        return Ok(None);
    }
    Ok(Some(SocketAddr::new(parse_address(field, bytes)?, parse_port(field, at)?.get())))
}

fn require_positive(field: &'static str, value: f64) -> WireResult<f64> {
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(WireError::new(field, value, "must be finite and above 0"))
    }
}

fn require_finite(field: &'static str, value: f64) -> WireResult<f64> {
    if value.is_finite() { Ok(value) } else { Err(WireError::new(field, value, "must be finite")) }
}

fn to_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn parse_optional_ms(value: u64) -> Option<Duration> {
    (value > 0).then(|| Duration::from_millis(value))
}

fn parse_connection_path(field: &'static str, message: raw::Path) -> WireResult<ConnectionPath> {
    match message {
        raw::Path::Direct => Ok(ConnectionPath::Direct),
        raw::Path::Activator => Ok(ConnectionPath::Activator),
        raw::Path::Unspecified => Err(WireError::new(field, "unspecified", "must be a known path")),
    }
}

fn raw_connection_path(value: ConnectionPath) -> i32 {
    match value {
        ConnectionPath::Direct => raw::Path::Direct.into(),
        ConnectionPath::Activator => raw::Path::Activator.into(),
    }
}

/// Parses a protocol that may be absent. An unknown one is refused: traffic in the wrong protocol would fail in a less
/// obvious way.
fn parse_optional_protocol(field: &'static str, value: i32) -> WireResult<Option<AppProtocol>> {
    match raw::Protocol::try_from(value) {
        Ok(raw::Protocol::Http1) => Ok(Some(AppProtocol::Http1)),
        Ok(raw::Protocol::H2c) => Ok(Some(AppProtocol::H2c)),
        Ok(raw::Protocol::Tcp) => Ok(Some(AppProtocol::Tcp)),
        Ok(raw::Protocol::Unspecified) => Ok(None),
        Err(_) => Err(unknown_protocol(field, value)),
    }
}

fn parse_protocol(field: &'static str, value: i32) -> WireResult<AppProtocol> {
    parse_optional_protocol(field, value)?.ok_or_else(|| unknown_protocol(field, value))
}

fn unknown_protocol(field: &'static str, value: i32) -> WireError {
    WireError::new(field, value, "must be a known protocol")
}

fn raw_protocol(value: AppProtocol) -> i32 {
    match value {
        AppProtocol::Http1 => raw::Protocol::Http1.into(),
        AppProtocol::H2c => raw::Protocol::H2c.into(),
        AppProtocol::Tcp => raw::Protocol::Tcp.into(),
    }
}

/// Parses the name of a Revision. Unlike that of a service, it has no port.
fn parse_revision_name(text: &str) -> WireResult<NamespacedName> {
    let name: NamespacedName = text.parse()?;
    if name.split_port().is_some() {
        return Err(WireError::new("revision", text, "must be namespace/name"));
    }
    Ok(name)
}

impl TryFrom<raw::Subscriber> for ComponentReplica {
    type Error = WireError;
    fn try_from(message: raw::Subscriber) -> WireResult<Self> {
        let role = match message.role() {
            // A sender of an unknown role could not be given the subjects that it needs, so there is no default.
            raw::Role::Agent => ClientComponent::Agent,
            raw::Role::Activator => ClientComponent::Activator,
            raw::Role::Autoscaler => ClientComponent::Autoscaler,
            raw::Role::Unspecified => {
                return Err(WireError::new(
                    "subscriber.role",
                    message.role,
                    "must be a known role",
                ));
            }
        };
        Ok(Self {
            role,
            name: require_nonempty("subscriber.name", message.name)?,
            node: message.node,
        })
    }
}

impl From<ComponentReplica> for raw::Subscriber {
    fn from(value: ComponentReplica) -> Self {
        let role = match value.role {
            ClientComponent::Agent => raw::Role::Agent,
            ClientComponent::Activator => raw::Role::Activator,
            ClientComponent::Autoscaler => raw::Role::Autoscaler,
        };
        // Each component of this release reads all items that it gets.
        Self { role: role.into(), name: value.name, node: value.node, reads_reserved_hosts: true }
    }
}
