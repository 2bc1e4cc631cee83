//! Pure: conversion from protobuf to checked types and back.
//!
//! A refused item names field, value and rule. The receiver drops the item, counts it and continues, since one bad
//! subject must not stop the others.

use super::*;

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
    fn try_from(it: raw::Subscriber) -> WireResult<Self> {
        let role = match it.role() {
            // A sender of an unknown role could not be given the subjects that it needs, so there is no default.
            raw::Role::Agent => ComponentRole::Agent,
            raw::Role::Activator => ComponentRole::Activator,
            raw::Role::Autoscaler => ComponentRole::Autoscaler,
            raw::Role::Unspecified => {
                return Err(WireError::new("subscriber.role", it.role, "must be a known role"));
            }
        };
        Ok(Self { role, name: require_nonempty("subscriber.name", it.name)?, node: it.node })
    }
}

impl From<ComponentReplica> for raw::Subscriber {
    fn from(it: ComponentReplica) -> Self {
        let role = match it.role {
            ComponentRole::Agent => raw::Role::Agent,
            ComponentRole::Activator => raw::Role::Activator,
            ComponentRole::Autoscaler => raw::Role::Autoscaler,
        };
        Self { role: role.into(), name: it.name, node: it.node }
    }
}

impl TryFrom<raw::RouteItem> for RouteItem {
    type Error = WireError;
    fn try_from(it: raw::RouteItem) -> WireResult<Self> {
        use raw::route_item::What;
        // An unknown kind of change decodes as an absent `what` and is refused: a later sender's new subjects do not
        // stop the stream.
        let change = match require("route_item.what", it.what)? {
            What::Service(it) => RouteChange::Service(it.try_into()?),
            What::Revision(it) => RouteChange::Revision(it.try_into()?),
            What::Pod(it) => RouteChange::Pod(Box::new(it.try_into()?)),
            What::Activator(it) => RouteChange::Activator(it.try_into()?),
            What::Replicas(it) => RouteChange::Replicas(it.try_into()?),
            What::Settings(it) => RouteChange::Settings(it.try_into()?),
            What::Gone(it) => RouteChange::Removed(it.try_into()?),
            What::Synced(_) => RouteChange::Synced,
        };
        Ok(Self { version: it.version, change })
    }
}

impl From<RouteItem> for raw::RouteItem {
    fn from(it: RouteItem) -> Self {
        use raw::route_item::What;
        let what = match it.change {
            RouteChange::Service(it) => What::Service(it.into()),
            RouteChange::Revision(it) => What::Revision(it.into()),
            RouteChange::Pod(it) => What::Pod((*it).into()),
            RouteChange::Activator(it) => What::Activator(it.into()),
            RouteChange::Replicas(it) => What::Replicas(it.into()),
            RouteChange::Settings(it) => What::Settings(it.into()),
            RouteChange::Removed(it) => What::Gone(it.into()),
            RouteChange::Synced => What::Synced(raw::Empty {}),
        };
        Self { version: it.version, what: Some(what) }
    }
}

impl TryFrom<raw::RouteGone> for RouteKey {
    type Error = WireError;
    fn try_from(it: raw::RouteGone) -> WireResult<Self> {
        use raw::route_gone::Key;
        Ok(match require("gone.key", it.key)? {
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
    fn from(it: RouteKey) -> Self {
        use raw::route_gone::Key;
        let key = match it {
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

fn parse_connection_path(field: &'static str, it: raw::Path) -> WireResult<ConnectionPath> {
    match it {
        raw::Path::Direct => Ok(ConnectionPath::Direct),
        raw::Path::Activator => Ok(ConnectionPath::Activator),
        raw::Path::Unspecified => Err(WireError::new(field, "unspecified", "must be a known path")),
    }
}

fn raw_connection_path(it: ConnectionPath) -> i32 {
    match it {
        ConnectionPath::Direct => raw::Path::Direct.into(),
        ConnectionPath::Activator => raw::Path::Activator.into(),
    }
}

impl TryFrom<raw::Service> for ServiceEntry {
    type Error = WireError;
    fn try_from(it: raw::Service) -> WireResult<Self> {
        let path = parse_connection_path("service.path", it.path())?;
        let targets =
            it.targets.into_iter().map(RouteTarget::try_from).collect::<WireResult<Vec<_>>>()?;
        let total: u32 = targets.iter().map(|target| u32::from(target.percent)).sum();
        // A service without targets is valid: it exists before its first Revision is ready, and answers 503.
        if !targets.is_empty() && total != 100 {
            return Err(WireError::new("service.targets", total, "percents must add up to 100"));
        }
        Ok(Self {
            name: it.name.parse()?,
            addresses: parse_addresses("service.addresses", &it.addresses)?,
            port: parse_port("service.port", it.port)?,
            activator_port: parse_port("service.activator_port", it.activator_port)?,
            targets,
            connection_path: path,
            hosts: it.hosts,
            gateway_rules: it.ingress.map(|it| it.try_into().map(Box::new)).transpose()?,
        })
    }
}

impl From<ServiceEntry> for raw::Service {
    fn from(it: ServiceEntry) -> Self {
        Self {
            name: it.name.to_string(),
            addresses: it.addresses.into_iter().map(address_octets).collect(),
            port: it.port.get().into(),
            activator_port: it.activator_port.get().into(),
            targets: it.targets.into_iter().map(Into::into).collect(),
            path: raw_connection_path(it.connection_path),
            hosts: it.hosts,
            ingress: it.gateway_rules.map(|it| (*it).into()),
        }
    }
}

impl TryFrom<raw::Ingress> for GatewayRules {
    type Error = WireError;
    fn try_from(it: raw::Ingress) -> WireResult<Self> {
        use raw::ingress::Tags;
        let tags = match it.tags {
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
        let domains =
            it.domains.into_iter().map(MappedDomain::try_from).collect::<WireResult<_>>()?;
        Ok(Self { redirects_to_https: it.redirects, mapped_domains: domains, tag_routing: tags })
    }
}

impl From<GatewayRules> for raw::Ingress {
    fn from(it: GatewayRules) -> Self {
        use raw::ingress::Tags;
        let tags = it.tag_routing.map(|it| match it {
            TagRouting::ChooseTag(tags) => {
                Tags::Choice(raw::TagChoice { tags: tags.into_iter().map(Into::into).collect() })
            }
            TagRouting::ServeTag(own) => Tags::Tag(own),
        });
        let domains = it.mapped_domains.into_iter().map(Into::into).collect();
        Self { redirects: it.redirects_to_https, domains, tags }
    }
}

impl TryFrom<raw::Domain> for MappedDomain {
    type Error = WireError;
    fn try_from(it: raw::Domain) -> WireResult<Self> {
        let host = require_nonempty("domain.host", it.host)?;
        // proto3 has no null for strings: empty stands for "as the client asked".
        let rewrite = (!it.rewrite.is_empty()).then_some(it.rewrite);
        Ok(Self { host, host_rewrite: rewrite, redirects_to_https: it.redirects })
    }
}

impl From<MappedDomain> for raw::Domain {
    fn from(it: MappedDomain) -> Self {
        let rewrite = it.host_rewrite.unwrap_or_default();
        Self { host: it.host, rewrite, redirects: it.redirects_to_https }
    }
}

impl TryFrom<raw::Tag> for RouteTag {
    type Error = WireError;
    fn try_from(it: raw::Tag) -> WireResult<Self> {
        Ok(Self { name: require_nonempty("tag.name", it.name)?, service: it.service.parse()? })
    }
}

impl From<RouteTag> for raw::Tag {
    fn from(it: RouteTag) -> Self {
        Self { name: it.name, service: it.service.to_string() }
    }
}

impl TryFrom<raw::Target> for RouteTarget {
    type Error = WireError;
    fn try_from(it: raw::Target) -> WireResult<Self> {
        let percent = u8::try_from(it.percent).ok().filter(|percent| (1..=100).contains(percent));
        let rule = "must be 1 to 100";
        let percent = percent.ok_or_else(|| WireError::new("target.percent", it.percent, rule))?;
        Ok(Self { revision: it.revision.parse()?, percent })
    }
}

impl From<RouteTarget> for raw::Target {
    fn from(it: RouteTarget) -> Self {
        Self { revision: it.revision.to_string(), percent: it.percent.into() }
    }
}

impl TryFrom<raw::Revision> for RevisionEntry {
    type Error = WireError;
    fn try_from(it: raw::Revision) -> WireResult<Self> {
        // An unknown protocol is refused: a request in the wrong protocol would fail in a less obvious way.
        let protocol = match it.protocol() {
            raw::Protocol::Http1 => AppProtocol::Http1,
            raw::Protocol::H2c => AppProtocol::H2c,
            raw::Protocol::Unspecified => {
                return Err(WireError::new(
                    "revision.protocol",
                    it.protocol,
                    "must be a known protocol",
                ));
            }
        };
        let timeout = parse_optional_ms(it.timeout_ms);
        Ok(Self {
            name: it.name.parse()?,
            service: it.service.into(),
            configuration: it.configuration.into(),
            container_concurrency: it.container_concurrency,
            timeout: timeout
                .ok_or_else(|| WireError::new("revision.timeout_ms", 0, "must be above 0"))?,
            response_start_timeout: parse_optional_ms(it.response_start_timeout_ms),
            idle_timeout: parse_optional_ms(it.idle_timeout_ms),
            protocol,
            // Only autoscalers receive a policy, and equal ones are shared on arrival in `RouteView::apply_item`.
            policy: it.policy.map(ScalePolicy::try_from).transpose()?.map(Arc::new),
            reachable: it.reachable,
            initial_scale_reached: it.initial_scale_reached,
            allowed_sources: it.sources.map(AllowedSources::try_from).transpose()?.map(Arc::new),
        })
    }
}

impl From<RevisionEntry> for raw::Revision {
    fn from(it: RevisionEntry) -> Self {
        let protocol = match it.protocol {
            AppProtocol::Http1 => raw::Protocol::Http1,
            AppProtocol::H2c => raw::Protocol::H2c,
        };
        Self {
            name: it.name.to_string(),
            service: it.service.into(),
            configuration: it.configuration.into(),
            container_concurrency: it.container_concurrency,
            timeout_ms: to_ms(it.timeout),
            response_start_timeout_ms: it.response_start_timeout.map_or(0, to_ms),
            idle_timeout_ms: it.idle_timeout.map_or(0, to_ms),
            protocol: protocol.into(),
            policy: it.policy.map(|it| Arc::unwrap_or_clone(it).into()),
            reachable: it.reachable,
            initial_scale_reached: it.initial_scale_reached,
            sources: it.allowed_sources.as_deref().map(raw::Sources::from),
        }
    }
}

impl TryFrom<raw::ScalePolicy> for ScalePolicy {
    type Error = WireError;
    fn try_from(it: raw::ScalePolicy) -> WireResult<Self> {
        let metric = match it.metric() {
            raw::Metric::Concurrency => ScaleMetric::Concurrency,
            raw::Metric::Rps => ScaleMetric::Rps,
            raw::Metric::Unspecified => {
                return Err(WireError::new("policy.metric", it.metric, "must be a known metric"));
            }
        };
        // Unspecified counts as `Linear`, which is the default of Knative, so a sender may omit it.
        let aggregation = match it.aggregation() {
            raw::Aggregation::WeightedExponential => WindowAggregation::WeightedExponential,
            raw::Aggregation::Linear | raw::Aggregation::Unspecified => WindowAggregation::Linear,
        };
        // Zero would divide by zero in every average.
        let window = parse_optional_ms(it.stable_window_ms);
        let window = window
            .ok_or_else(|| WireError::new("policy.stable_window_ms", 0, "must be above 0"))?;
        Ok(Self {
            metric,
            target_total: require_positive("policy.total", it.total)?,
            target_utilization: require_positive("policy.utilization", it.utilization)?,
            target_burst_capacity: require_finite(
                "policy.target_burst_capacity",
                it.target_burst_capacity,
            )?,
            activator_capacity: require_positive(
                "policy.activator_capacity",
                it.activator_capacity,
            )?,
            stable_window: window,
            panic_window_percent: require_positive(
                "policy.panic_window_percent",
                it.panic_window_percent,
            )?,
            panic_threshold_percent: require_positive(
                "policy.panic_threshold_percent",
                it.panic_threshold_percent,
            )?,
            max_scale_up_rate: require_positive("policy.max_scale_up_rate", it.max_scale_up_rate)?,
            max_scale_down_rate: require_positive(
                "policy.max_scale_down_rate",
                it.max_scale_down_rate,
            )?,
            min_scale: it.min_scale,
            max_scale: it.max_scale,
            initial_scale: it.initial_scale,
            activation_scale: it.activation_scale,
            scale_down_delay: Duration::from_millis(it.scale_down_delay_ms),
            scale_to_zero: it.scale_to_zero,
            scale_to_zero_grace_period: Duration::from_millis(it.grace_ms),
            scale_to_zero_retention_period: Duration::from_millis(it.retention_ms),
            progress_deadline: Duration::from_millis(it.progress_deadline_ms),
            aggregation,
        })
    }
}

impl From<ScalePolicy> for raw::ScalePolicy {
    fn from(it: ScalePolicy) -> Self {
        let metric = match it.metric {
            ScaleMetric::Concurrency => raw::Metric::Concurrency,
            ScaleMetric::Rps => raw::Metric::Rps,
        };
        let aggregation = match it.aggregation {
            WindowAggregation::Linear => raw::Aggregation::Linear,
            WindowAggregation::WeightedExponential => raw::Aggregation::WeightedExponential,
        };
        Self {
            metric: metric.into(),
            total: it.target_total,
            utilization: it.target_utilization,
            target_burst_capacity: it.target_burst_capacity,
            activator_capacity: it.activator_capacity,
            stable_window_ms: to_ms(it.stable_window),
            panic_window_percent: it.panic_window_percent,
            panic_threshold_percent: it.panic_threshold_percent,
            max_scale_up_rate: it.max_scale_up_rate,
            max_scale_down_rate: it.max_scale_down_rate,
            min_scale: it.min_scale,
            max_scale: it.max_scale,
            initial_scale: it.initial_scale,
            activation_scale: it.activation_scale,
            scale_down_delay_ms: to_ms(it.scale_down_delay),
            scale_to_zero: it.scale_to_zero,
            grace_ms: to_ms(it.scale_to_zero_grace_period),
            retention_ms: to_ms(it.scale_to_zero_retention_period),
            progress_deadline_ms: to_ms(it.progress_deadline),
            aggregation: aggregation.into(),
        }
    }
}

impl TryFrom<raw::Pod> for PodEntry {
    type Error = WireError;
    fn try_from(it: raw::Pod) -> WireResult<Self> {
        let phase = match it.phase() {
            raw::PodPhase::Starting => RoutingPhase::Starting,
            raw::PodPhase::Ready => RoutingPhase::Ready,
            raw::PodPhase::Draining => RoutingPhase::Draining,
            raw::PodPhase::Unspecified => {
                return Err(WireError::new("pod.phase", it.phase, "must be a known phase"));
            }
        };
        let at = parse_socket_address("pod.address", &it.address, it.port)?;
        // Receivers route to each ready pod without checking again that it has an address.
        if phase == RoutingPhase::Ready && at.is_none() {
            return Err(WireError::new("pod.address", "", "a ready pod has an address"));
        }
        Ok(Self {
            uid: require_nonempty("pod.uid", it.uid)?,
            name: it.name,
            revision: it.revision.parse()?,
            node: it.node,
            zone: it.zone,
            phase,
            address: at,
            other_family_address: parse_optional_address("pod.also", &it.also)?,
            kubelet_ready: it.confirmed,
            port: parse_port("pod.port", it.port)?,
            probe: require("pod.probe", it.probe)?.try_into()?,
        })
    }
}

impl From<PodEntry> for raw::Pod {
    fn from(it: PodEntry) -> Self {
        let phase = match it.phase {
            RoutingPhase::Starting => raw::PodPhase::Starting,
            RoutingPhase::Ready => raw::PodPhase::Ready,
            RoutingPhase::Draining => raw::PodPhase::Draining,
        };
        Self {
            uid: it.uid,
            name: it.name,
            revision: it.revision.to_string(),
            node: it.node,
            zone: it.zone,
            phase: phase.into(),
            address: it.address.map(|at| address_octets(at.ip())).unwrap_or_default(),
            port: it.port.get().into(),
            probe: Some(it.probe.into()),
            also: it.other_family_address.map(address_octets).unwrap_or_default(),
            confirmed: it.kubelet_ready,
        }
    }
}

impl TryFrom<raw::Probe> for ReadinessProbe {
    type Error = WireError;
    fn try_from(it: raw::Probe) -> WireResult<Self> {
        use raw::probe::How;
        let how = match require("probe.how", it.how)? {
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
        let at = if it.port == 0 { None } else { Some(parse_port("probe.port", it.port)?) };
        Ok(Self {
            handler: how,
            port: at,
            period: Duration::from_millis(it.period_ms),
            timeout: Duration::from_millis(it.timeout_ms),
            // A sender may omit the thresholds; Kubernetes allows none below 1.
            success_threshold: it.success_threshold.max(1),
            failure_threshold: it.failure_threshold.max(1),
        })
    }
}

impl From<ReadinessProbe> for raw::Probe {
    fn from(it: ReadinessProbe) -> Self {
        use raw::probe::How;
        let header = |(name, value)| raw::Header { name, value };
        let how = match it.handler {
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
            port: it.port.map_or(0, |port| port.get().into()),
            period_ms: to_ms(it.period),
            timeout_ms: to_ms(it.timeout),
            success_threshold: it.success_threshold,
            failure_threshold: it.failure_threshold,
        }
    }
}

impl TryFrom<raw::Activator> for ActivatorEntry {
    type Error = WireError;
    fn try_from(it: raw::Activator) -> WireResult<Self> {
        Ok(Self {
            name: require_nonempty("activator.name", it.name)?,
            node: it.node,
            zone: it.zone,
            addresses: parse_addresses("activator.addresses", &it.addresses)?,
        })
    }
}

impl From<ActivatorEntry> for raw::Activator {
    fn from(it: ActivatorEntry) -> Self {
        let addresses = it.addresses.into_iter().map(address_octets).collect();
        Self { name: it.name, node: it.node, zone: it.zone, addresses }
    }
}

fn parse_server_component(field: &'static str, it: i32) -> WireResult<ServerComponent> {
    match raw::Part::try_from(it) {
        Ok(raw::Part::Controller) => Ok(ServerComponent::Controller),
        Ok(raw::Part::Autoscaler) => Ok(ServerComponent::Autoscaler),
        Ok(raw::Part::Unspecified) | Err(_) => {
            Err(WireError::new(field, it, "must be a known part"))
        }
    }
}

fn raw_server_component(it: ServerComponent) -> i32 {
    match it {
        ServerComponent::Controller => raw::Part::Controller.into(),
        ServerComponent::Autoscaler => raw::Part::Autoscaler.into(),
    }
}

impl TryFrom<raw::Replicas> for ServerReplicas {
    type Error = WireError;
    fn try_from(it: raw::Replicas) -> WireResult<Self> {
        Ok(Self {
            component: parse_server_component("replicas.part", it.part)?,
            members: it
                .members
                .into_iter()
                .map(ServerReplica::try_from)
                .collect::<WireResult<_>>()?,
            // Empty stands for none: names of replicas are never empty.
            active: (!it.chosen.is_empty()).then_some(it.chosen),
        })
    }
}

impl From<ServerReplicas> for raw::Replicas {
    fn from(it: ServerReplicas) -> Self {
        Self {
            part: raw_server_component(it.component),
            members: it.members.into_iter().map(Into::into).collect(),
            chosen: it.active.unwrap_or_default(),
        }
    }
}

impl TryFrom<raw::Replica> for ServerReplica {
    type Error = WireError;
    fn try_from(it: raw::Replica) -> WireResult<Self> {
        let ip = parse_address("replica.address", &it.address)?;
        let address = SocketAddr::new(ip, parse_port("replica.port", it.port)?.get());
        Ok(Self { name: require_nonempty("replica.name", it.name)?, address })
    }
}

impl From<ServerReplica> for raw::Replica {
    fn from(it: ServerReplica) -> Self {
        let (address, port) = (address_octets(it.address.ip()), it.address.port().into());
        Self { name: it.name, address, port }
    }
}

impl TryFrom<raw::PodItem> for PodReportItem {
    type Error = WireError;
    fn try_from(it: raw::PodItem) -> WireResult<Self> {
        use raw::pod_item::What;
        Ok(match require("pod_item.what", it.what)? {
            What::Sender(it) => Self::Sender(it.try_into()?),
            What::Pod(it) => Self::Observed(it.try_into()?),
            What::Gone(uid) => Self::Removed(require_nonempty("pod_item.gone", uid)?),
            What::Applied(it) => Self::Applied(it.version),
            // Routed services share the message of draining pods: a new kind would be refused by earlier releases. The
            // order of these arms matters, since `*` parses as no name.
            What::Avoided(it) if it.routed == ALL_ROUTED_SERVICES => Self::RoutedServicesAnnounced,
            What::Avoided(it) if !it.routed.is_empty() => {
                let name = it.routed.parse()?;
                if it.ended { Self::RoutedServiceRemoved(name) } else { Self::RoutedService(name) }
            }
            What::Avoided(it) if it.ended => {
                Self::DrainAckRemoved(require_nonempty("avoided.uid", it.uid)?)
            }
            What::Avoided(it) => Self::DrainAck(require_nonempty("avoided.uid", it.uid)?),
            What::Synced(_) => Self::Synced,
        })
    }
}

impl From<PodReportItem> for raw::PodItem {
    fn from(it: PodReportItem) -> Self {
        use raw::pod_item::What;
        let what = match it {
            PodReportItem::Sender(it) => What::Sender(it.into()),
            PodReportItem::Observed(it) => What::Pod(it.into()),
            PodReportItem::Removed(uid) => What::Gone(uid),
            PodReportItem::Applied(version) => What::Applied(raw::Applied { version }),
            PodReportItem::DrainAck(uid) => What::Avoided(raw_drain_ack(uid, false)),
            PodReportItem::DrainAckRemoved(uid) => What::Avoided(raw_drain_ack(uid, true)),
            PodReportItem::RoutedServicesAnnounced => {
                What::Avoided(raw_routed_service(ALL_ROUTED_SERVICES.into(), false))
            }
            PodReportItem::RoutedService(name) => {
                What::Avoided(raw_routed_service(name.to_string(), false))
            }
            PodReportItem::RoutedServiceRemoved(name) => {
                What::Avoided(raw_routed_service(name.to_string(), true))
            }
            PodReportItem::Synced => What::Synced(raw::Empty {}),
        };
        Self { what: Some(what) }
    }
}

/// Value in the place of a service's name: the sender will name all of its services.
const ALL_ROUTED_SERVICES: &str = "*";

fn raw_drain_ack(uid: String, ended: bool) -> raw::Avoided {
    raw::Avoided { uid, ended, routed: String::new() }
}

fn raw_routed_service(routed: String, ended: bool) -> raw::Avoided {
    // Earlier releases refuse an item without a uid; they ignore a uid that they do not know.
    raw::Avoided { uid: "-".into(), ended, routed }
}

impl TryFrom<raw::PodSeen> for PodObservation {
    type Error = WireError;
    fn try_from(it: raw::PodSeen) -> WireResult<Self> {
        let at = parse_socket_address("pod_seen.address", &it.address, it.port)?;
        // A replica of the controller turns this into a ready pod of the table, which must have an address.
        if it.ready && (at.is_none() || !it.listening) {
            return Err(WireError::new(
                "pod_seen.ready",
                true,
                "a ready pod listens and has an address",
            ));
        }
        Ok(Self {
            uid: require_nonempty("pod_seen.uid", it.uid)?,
            address: at,
            other_family_address: parse_optional_address("pod_seen.also", &it.also)?,
            listening: it.listening,
            ready: it.ready,
            drained: it.drained,
            in_flight: it.in_flight,
            listening_since_ns: it.listening_since_ns,
            not_ready_reason: it.trouble,
        })
    }
}

impl From<PodObservation> for raw::PodSeen {
    fn from(it: PodObservation) -> Self {
        Self {
            uid: it.uid,
            address: it.address.map(|at| address_octets(at.ip())).unwrap_or_default(),
            port: it.address.map_or(0, |at| at.port().into()),
            listening: it.listening,
            ready: it.ready,
            drained: it.drained,
            in_flight: it.in_flight,
            listening_since_ns: it.listening_since_ns,
            trouble: it.not_ready_reason,
            also: it.other_family_address.map(address_octets).unwrap_or_default(),
        }
    }
}
