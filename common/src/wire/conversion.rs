//! Pure: conversion from protobuf to checked types and back.
//!
//! A refused item names field, value and rule. The receiver logs and drops the item and continues, since one bad
//! subject must not stop the others.

use super::*;

mod pod_reports;
mod settings;
mod slots;
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
        Self { role: role.into(), name: value.name, node: value.node }
    }
}

impl TryFrom<raw::RouteItem> for RouteItem {
    type Error = WireError;
    fn try_from(message: raw::RouteItem) -> WireResult<Self> {
        use raw::route_item::What;
        // An unknown kind of change decodes as an absent `what` and is refused: a later sender's new subjects do not
        // stop the stream.
        let change = match require("route_item.what", message.what)? {
            What::Service(message) => RouteChange::Service(message.try_into()?),
            What::Revision(message) => RouteChange::Revision(message.try_into()?),
            What::Pod(message) => RouteChange::Pod(Box::new(message.try_into()?)),
            What::Activator(message) => RouteChange::Activator(message.try_into()?),
            What::Replicas(message) => RouteChange::Replicas(message.try_into()?),
            What::Settings(message) => RouteChange::Settings(message.try_into()?),
            What::Gone(message) => RouteChange::Removed(message.try_into()?),
            What::Synced(_) => RouteChange::Synced,
        };
        Ok(Self { version: message.version, change })
    }
}

impl From<RouteItem> for raw::RouteItem {
    fn from(value: RouteItem) -> Self {
        use raw::route_item::What;
        let what = match value.change {
            RouteChange::Service(value) => What::Service(value.into()),
            RouteChange::Revision(value) => What::Revision(value.into()),
            RouteChange::Pod(value) => What::Pod((*value).into()),
            RouteChange::Activator(value) => What::Activator(value.into()),
            RouteChange::Replicas(value) => What::Replicas(value.into()),
            RouteChange::Settings(value) => What::Settings(value.into()),
            RouteChange::Removed(value) => What::Gone(value.into()),
            RouteChange::Synced => What::Synced(raw::Empty {}),
        };
        Self { version: value.version, what: Some(what) }
    }
}

impl TryFrom<raw::RouteGone> for RouteKey {
    type Error = WireError;
    fn try_from(message: raw::RouteGone) -> WireResult<Self> {
        use raw::route_gone::Key;
        Ok(match require("gone.key", message.key)? {
            Key::Service(name) => Self::Service(name.parse()?),
            Key::Revision(name) => Self::Revision(name.parse()?),
            Key::Pod(uid) => Self::Pod(require_nonempty("gone.pod", uid)?),
            Key::Activator(name) => Self::Activator(require_nonempty("gone.activator", name)?),
            Key::Replicas(at) => Self::Replicas(parse_server_component("gone.replicas", at)?),
            Key::Settings(_) => Self::Settings,
        })
    }
}

impl From<RouteKey> for raw::RouteGone {
    fn from(value: RouteKey) -> Self {
        use raw::route_gone::Key;
        let key = match value {
            RouteKey::Service(name) => Key::Service(name.to_string()),
            RouteKey::Revision(name) => Key::Revision(name.to_string()),
            RouteKey::Pod(uid) => Key::Pod(uid),
            RouteKey::Activator(name) => Key::Activator(name),
            RouteKey::Replicas(part) => Key::Replicas(raw_server_component(part)),
            RouteKey::Settings => Key::Settings(raw::Empty {}),
        };
        Self { key: Some(key) }
    }
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

impl TryFrom<raw::Service> for ServiceEntry {
    type Error = WireError;
    fn try_from(message: raw::Service) -> WireResult<Self> {
        let connection_path = parse_connection_path("service.path", message.path())?;
        let targets = message
            .targets
            .into_iter()
            .map(RouteTarget::try_from)
            .collect::<WireResult<Vec<_>>>()?;
        let total: u32 = targets.iter().map(|target| u32::from(target.percent)).sum();
        // A service without targets is valid: it exists before its first Revision is ready, and answers 503.
        if !targets.is_empty() && total != 100 {
            return Err(WireError::new("service.targets", total, "percents must add up to 100"));
        }
        Ok(Self {
            name: message.name.parse()?,
            addresses: parse_addresses("service.addresses", &message.addresses)?,
            port: parse_port("service.port", message.port)?,
            activator_port: parse_port("service.activator_port", message.activator_port)?,
            targets,
            connection_path,
            hosts: message.hosts,
            gateway_rules: message
                .ingress
                .map(|rules| rules.try_into().map(Box::new))
                .transpose()?,
        })
    }
}

impl From<ServiceEntry> for raw::Service {
    fn from(value: ServiceEntry) -> Self {
        Self {
            name: value.name.to_string(),
            addresses: value.addresses.into_iter().map(address_octets).collect(),
            port: value.port.get().into(),
            activator_port: value.activator_port.get().into(),
            targets: value.targets.into_iter().map(Into::into).collect(),
            path: raw_connection_path(value.connection_path),
            hosts: value.hosts,
            ingress: value.gateway_rules.map(|rules| (*rules).into()),
        }
    }
}

impl TryFrom<raw::Ingress> for GatewayRules {
    type Error = WireError;
    fn try_from(message: raw::Ingress) -> WireResult<Self> {
        use raw::ingress::Tags;
        let tag_routing = match message.tags {
            None => None,
            Some(Tags::Choice(among)) => {
                let tags =
                    among.tags.into_iter().map(RouteTag::try_from).collect::<WireResult<_>>()?;
                Some(TagRouting::ChooseTag(tags))
            }
            Some(Tags::Tag(own)) => {
                Some(TagRouting::ServeTag(require_nonempty("ingress.tag", own)?))
            }
        };
        let mapped_domains =
            message.domains.into_iter().map(MappedDomain::try_from).collect::<WireResult<_>>()?;
        Ok(Self { redirects_to_https: message.redirects, mapped_domains, tag_routing })
    }
}

impl From<GatewayRules> for raw::Ingress {
    fn from(value: GatewayRules) -> Self {
        use raw::ingress::Tags;
        let tags = value.tag_routing.map(|routing| match routing {
            TagRouting::ChooseTag(tags) => {
                Tags::Choice(raw::TagChoice { tags: tags.into_iter().map(Into::into).collect() })
            }
            TagRouting::ServeTag(own) => Tags::Tag(own),
        });
        let domains = value.mapped_domains.into_iter().map(Into::into).collect();
        Self { redirects: value.redirects_to_https, domains, tags }
    }
}

impl TryFrom<raw::Domain> for MappedDomain {
    type Error = WireError;
    fn try_from(message: raw::Domain) -> WireResult<Self> {
        let host = require_nonempty("domain.host", message.host)?;
        // proto3 has no null for strings: empty stands for "as the client asked".
        let host_rewrite = (!message.rewrite.is_empty()).then_some(message.rewrite);
        Ok(Self { host, host_rewrite, redirects_to_https: message.redirects })
    }
}

impl From<MappedDomain> for raw::Domain {
    fn from(value: MappedDomain) -> Self {
        let rewrite = value.host_rewrite.unwrap_or_default();
        Self { host: value.host, rewrite, redirects: value.redirects_to_https }
    }
}

impl TryFrom<raw::Tag> for RouteTag {
    type Error = WireError;
    fn try_from(message: raw::Tag) -> WireResult<Self> {
        Ok(Self {
            name: require_nonempty("tag.name", message.name)?,
            service: message.service.parse()?,
        })
    }
}

impl From<RouteTag> for raw::Tag {
    fn from(value: RouteTag) -> Self {
        Self { name: value.name, service: value.service.to_string() }
    }
}

impl TryFrom<raw::Target> for RouteTarget {
    type Error = WireError;
    fn try_from(message: raw::Target) -> WireResult<Self> {
        let percent =
            u8::try_from(message.percent).ok().filter(|percent| (1..=100).contains(percent));
        let rule = "must be 1 to 100";
        let percent =
            percent.ok_or_else(|| WireError::new("target.percent", message.percent, rule))?;
        Ok(Self { revision: message.revision.parse()?, percent })
    }
}

impl From<RouteTarget> for raw::Target {
    fn from(value: RouteTarget) -> Self {
        Self { revision: value.revision.to_string(), percent: value.percent.into() }
    }
}

impl TryFrom<raw::Revision> for RevisionEntry {
    type Error = WireError;
    fn try_from(message: raw::Revision) -> WireResult<Self> {
        // An unknown protocol is refused: a request in the wrong protocol would fail in a less obvious way.
        let protocol = match message.protocol() {
            raw::Protocol::Http1 => AppProtocol::Http1,
            raw::Protocol::H2c => AppProtocol::H2c,
            raw::Protocol::Unspecified => {
                return Err(WireError::new(
                    "revision.protocol",
                    message.protocol,
                    "must be a known protocol",
                ));
            }
        };
        let timeout = parse_optional_ms(message.timeout_ms);
        Ok(Self {
            name: message.name.parse()?,
            service: message.service.into(),
            configuration: message.configuration.into(),
            container_concurrency: message.container_concurrency,
            timeout: timeout
                .ok_or_else(|| WireError::new("revision.timeout_ms", 0, "must be above 0"))?,
            response_start_timeout: parse_optional_ms(message.response_start_timeout_ms),
            idle_timeout: parse_optional_ms(message.idle_timeout_ms),
            protocol,
            // Only autoscalers receive a policy, and equal ones are shared on arrival in `RouteView::apply_item`.
            policy: message.policy.map(ScalePolicy::try_from).transpose()?.map(Arc::new),
            reachable: message.reachable,
            initial_scale_reached: message.initial_scale_reached,
            allowed_sources: message
                .sources
                .map(AllowedSources::try_from)
                .transpose()?
                .map(Arc::new),
        })
    }
}

impl From<RevisionEntry> for raw::Revision {
    fn from(value: RevisionEntry) -> Self {
        let protocol = match value.protocol {
            AppProtocol::Http1 => raw::Protocol::Http1,
            AppProtocol::H2c => raw::Protocol::H2c,
        };
        Self {
            name: value.name.to_string(),
            service: value.service.into(),
            configuration: value.configuration.into(),
            container_concurrency: value.container_concurrency,
            timeout_ms: to_ms(value.timeout),
            response_start_timeout_ms: value.response_start_timeout.map_or(0, to_ms),
            idle_timeout_ms: value.idle_timeout.map_or(0, to_ms),
            protocol: protocol.into(),
            policy: value.policy.map(|policy| Arc::unwrap_or_clone(policy).into()),
            reachable: value.reachable,
            initial_scale_reached: value.initial_scale_reached,
            sources: value.allowed_sources.as_deref().map(raw::Sources::from),
        }
    }
}

impl TryFrom<raw::ScalePolicy> for ScalePolicy {
    type Error = WireError;
    fn try_from(message: raw::ScalePolicy) -> WireResult<Self> {
        let metric = match message.metric() {
            raw::Metric::Concurrency => ScaleMetric::Concurrency,
            raw::Metric::Rps => ScaleMetric::Rps,
            raw::Metric::Unspecified => {
                return Err(WireError::new(
                    "policy.metric",
                    message.metric,
                    "must be a known metric",
                ));
            }
        };
        // Unspecified counts as `Linear`, which is the default of Knative, so a sender may omit it.
        let aggregation = match message.aggregation() {
            raw::Aggregation::WeightedExponential => WindowAggregation::WeightedExponential,
            raw::Aggregation::Linear | raw::Aggregation::Unspecified => WindowAggregation::Linear,
        };
        // Zero would divide by zero in every average.
        let stable_window = parse_optional_ms(message.stable_window_ms);
        let stable_window = stable_window
            .ok_or_else(|| WireError::new("policy.stable_window_ms", 0, "must be above 0"))?;
        Ok(Self {
            metric,
            target_total: require_positive("policy.total", message.total)?,
            target_utilization: require_positive("policy.utilization", message.utilization)?,
            target_burst_capacity: require_finite(
                "policy.target_burst_capacity",
                message.target_burst_capacity,
            )?,
            activator_capacity: require_positive(
                "policy.activator_capacity",
                message.activator_capacity,
            )?,
            stable_window,
            panic_window_percent: require_positive(
                "policy.panic_window_percent",
                message.panic_window_percent,
            )?,
            panic_threshold_percent: require_positive(
                "policy.panic_threshold_percent",
                message.panic_threshold_percent,
            )?,
            max_scale_up_rate: require_positive(
                "policy.max_scale_up_rate",
                message.max_scale_up_rate,
            )?,
            max_scale_down_rate: require_positive(
                "policy.max_scale_down_rate",
                message.max_scale_down_rate,
            )?,
            min_scale: message.min_scale,
            max_scale: message.max_scale,
            initial_scale: message.initial_scale,
            activation_scale: message.activation_scale,
            scale_down_delay: Duration::from_millis(message.scale_down_delay_ms),
            scale_to_zero: message.scale_to_zero,
            scale_to_zero_grace_period: Duration::from_millis(message.grace_ms),
            scale_to_zero_retention_period: Duration::from_millis(message.retention_ms),
            progress_deadline: Duration::from_millis(message.progress_deadline_ms),
            aggregation,
        })
    }
}

impl From<ScalePolicy> for raw::ScalePolicy {
    fn from(value: ScalePolicy) -> Self {
        let metric = match value.metric {
            ScaleMetric::Concurrency => raw::Metric::Concurrency,
            ScaleMetric::Rps => raw::Metric::Rps,
        };
        let aggregation = match value.aggregation {
            WindowAggregation::Linear => raw::Aggregation::Linear,
            WindowAggregation::WeightedExponential => raw::Aggregation::WeightedExponential,
        };
        Self {
            metric: metric.into(),
            total: value.target_total,
            utilization: value.target_utilization,
            target_burst_capacity: value.target_burst_capacity,
            activator_capacity: value.activator_capacity,
            stable_window_ms: to_ms(value.stable_window),
            panic_window_percent: value.panic_window_percent,
            panic_threshold_percent: value.panic_threshold_percent,
            max_scale_up_rate: value.max_scale_up_rate,
            max_scale_down_rate: value.max_scale_down_rate,
            min_scale: value.min_scale,
            max_scale: value.max_scale,
            initial_scale: value.initial_scale,
            activation_scale: value.activation_scale,
            scale_down_delay_ms: to_ms(value.scale_down_delay),
            scale_to_zero: value.scale_to_zero,
            grace_ms: to_ms(value.scale_to_zero_grace_period),
            retention_ms: to_ms(value.scale_to_zero_retention_period),
            progress_deadline_ms: to_ms(value.progress_deadline),
            aggregation: aggregation.into(),
        }
    }
}

impl TryFrom<raw::Pod> for PodEntry {
    type Error = WireError;
    fn try_from(message: raw::Pod) -> WireResult<Self> {
        let phase = match message.phase() {
            raw::PodPhase::Starting => RoutingPhase::Starting,
            raw::PodPhase::Ready => RoutingPhase::Ready,
            raw::PodPhase::Draining => RoutingPhase::Draining,
            raw::PodPhase::Unspecified => {
                return Err(WireError::new("pod.phase", message.phase, "must be a known phase"));
            }
        };
        let address = parse_socket_address("pod.address", &message.address, message.port)?;
        // Receivers route to each ready pod without checking again that it has an address.
        if phase == RoutingPhase::Ready && address.is_none() {
            return Err(WireError::new("pod.address", "", "a ready pod has an address"));
        }
        Ok(Self {
            uid: require_nonempty("pod.uid", message.uid)?,
            name: message.name,
            revision: message.revision.parse()?,
            node: message.node,
            zone: message.zone,
            phase,
            address,
            other_family_address: parse_optional_address("pod.also", &message.also)?,
            kubelet_ready: message.confirmed,
            port: parse_port("pod.port", message.port)?,
            probe: require("pod.probe", message.probe)?.try_into()?,
        })
    }
}

impl From<PodEntry> for raw::Pod {
    fn from(value: PodEntry) -> Self {
        let phase = match value.phase {
            RoutingPhase::Starting => raw::PodPhase::Starting,
            RoutingPhase::Ready => raw::PodPhase::Ready,
            RoutingPhase::Draining => raw::PodPhase::Draining,
        };
        Self {
            uid: value.uid,
            name: value.name,
            revision: value.revision.to_string(),
            node: value.node,
            zone: value.zone,
            phase: phase.into(),
            address: value.address.map(|at| address_octets(at.ip())).unwrap_or_default(),
            port: value.port.get().into(),
            probe: Some(value.probe.into()),
            also: value.other_family_address.map(address_octets).unwrap_or_default(),
            confirmed: value.kubelet_ready,
        }
    }
}

impl TryFrom<raw::Probe> for ReadinessProbe {
    type Error = WireError;
    fn try_from(message: raw::Probe) -> WireResult<Self> {
        use raw::probe::How;
        let handler = match require("probe.how", message.how)? {
            How::Listen(_) => ProbeHandler::Listen,
            How::Tcp(_) => ProbeHandler::Tcp,
            How::Http(http) => ProbeHandler::Http {
                path: http.path,
                headers: http
                    .headers
                    .into_iter()
                    .map(|header| (header.name, header.value))
                    .collect(),
                host: http.host,
                https: http.https,
            },
            How::Grpc(grpc) => ProbeHandler::Grpc { service: grpc.service },
        };
        // 0 is no port, so it can stand for the serving port.
        let port =
            if message.port == 0 { None } else { Some(parse_port("probe.port", message.port)?) };
        Ok(Self {
            handler,
            port,
            period: Duration::from_millis(message.period_ms),
            timeout: Duration::from_millis(message.timeout_ms),
            // A sender may omit the thresholds; Kubernetes allows none below 1.
            success_threshold: message.success_threshold.max(1),
            failure_threshold: message.failure_threshold.max(1),
        })
    }
}

impl From<ReadinessProbe> for raw::Probe {
    fn from(probe: ReadinessProbe) -> Self {
        use raw::probe::How;
        let header = |(name, value)| raw::Header { name, value };
        let how = match probe.handler {
            ProbeHandler::Listen => How::Listen(raw::Empty {}),
            ProbeHandler::Tcp => How::Tcp(raw::Empty {}),
            ProbeHandler::Http { path, headers, host, https } => How::Http(raw::HttpProbe {
                path,
                headers: headers.into_iter().map(header).collect(),
                host,
                https,
            }),
            ProbeHandler::Grpc { service } => How::Grpc(raw::GrpcProbe { service }),
        };
        Self {
            how: Some(how),
            port: probe.port.map_or(0, |port| port.get().into()),
            period_ms: to_ms(probe.period),
            timeout_ms: to_ms(probe.timeout),
            success_threshold: probe.success_threshold,
            failure_threshold: probe.failure_threshold,
        }
    }
}

impl TryFrom<raw::Activator> for ActivatorEntry {
    type Error = WireError;
    fn try_from(message: raw::Activator) -> WireResult<Self> {
        Ok(Self {
            name: require_nonempty("activator.name", message.name)?,
            node: message.node,
            zone: message.zone,
            addresses: parse_addresses("activator.addresses", &message.addresses)?,
        })
    }
}

impl From<ActivatorEntry> for raw::Activator {
    fn from(value: ActivatorEntry) -> Self {
        let addresses = value.addresses.into_iter().map(address_octets).collect();
        Self { name: value.name, node: value.node, zone: value.zone, addresses }
    }
}

fn parse_server_component(field: &'static str, value: i32) -> WireResult<ServerComponent> {
    match raw::Part::try_from(value) {
        Ok(raw::Part::Controller) => Ok(ServerComponent::Controller),
        Ok(raw::Part::Autoscaler) => Ok(ServerComponent::Autoscaler),
        Ok(raw::Part::Unspecified) | Err(_) => {
            Err(WireError::new(field, value, "must be a known part"))
        }
    }
}

fn raw_server_component(value: ServerComponent) -> i32 {
    match value {
        ServerComponent::Controller => raw::Part::Controller.into(),
        ServerComponent::Autoscaler => raw::Part::Autoscaler.into(),
    }
}

impl TryFrom<raw::Replicas> for ServerReplicas {
    type Error = WireError;
    fn try_from(message: raw::Replicas) -> WireResult<Self> {
        Ok(Self {
            component: parse_server_component("replicas.part", message.part)?,
            members: message
                .members
                .into_iter()
                .map(ServerReplica::try_from)
                .collect::<WireResult<_>>()?,
            // Empty stands for none: names of replicas are never empty.
            active: (!message.chosen.is_empty()).then_some(message.chosen),
        })
    }
}

impl From<ServerReplicas> for raw::Replicas {
    fn from(value: ServerReplicas) -> Self {
        Self {
            part: raw_server_component(value.component),
            members: value.members.into_iter().map(Into::into).collect(),
            chosen: value.active.unwrap_or_default(),
        }
    }
}

impl TryFrom<raw::Replica> for ServerReplica {
    type Error = WireError;
    fn try_from(message: raw::Replica) -> WireResult<Self> {
        let ip = parse_address("replica.address", &message.address)?;
        let address = SocketAddr::new(ip, parse_port("replica.port", message.port)?.get());
        Ok(Self { name: require_nonempty("replica.name", message.name)?, address })
    }
}

impl From<ServerReplica> for raw::Replica {
    fn from(value: ServerReplica) -> Self {
        let (address, port) = (address_octets(value.address.ip()), value.address.port().into());
        Self { name: value.name, address, port }
    }
}
