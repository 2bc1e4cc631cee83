//! Pure: conversion of the RouteTable: its items, services, Revisions, activators, nodes and replicas.

use super::{
    certificates::{parse_certificate_name, parse_secret_name},
    settings::parse_hsts,
    *,
};

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
            What::Node(message) => RouteChange::Node(message.try_into()?),
            What::GatewayHost(message) => RouteChange::GatewayHost(message.try_into()?),
            What::ReservedHost(host) => {
                RouteChange::ReservedHost(require_nonempty("route_item.reserved_host", host)?)
            }
            What::Certificate(message) => RouteChange::Certificate(message.try_into()?),
            What::ClientCa(message) => RouteChange::ClientCa(message.try_into()?),
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
            RouteChange::Node(value) => What::Node(value.into()),
            RouteChange::GatewayHost(value) => What::GatewayHost(value.into()),
            RouteChange::ReservedHost(host) => What::ReservedHost(host),
            RouteChange::Certificate(value) => What::Certificate(value.into()),
            RouteChange::ClientCa(value) => What::ClientCa(value.into()),
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
            Key::Revision(name) => Self::Revision(parse_revision_name(&name)?),
            Key::Pod(uid) => Self::Pod(require_nonempty("gone.pod", uid)?),
            Key::Activator(name) => Self::Activator(require_nonempty("gone.activator", name)?),
            Key::Replicas(at) => Self::Replicas(parse_server_component("gone.replicas", at)?),
            Key::Settings(_) => Self::Settings,
            Key::Node(name) => Self::Node(require_nonempty("gone.node", name)?),
            Key::GatewayHost(key) => Self::GatewayHost(key.parse()?),
            Key::ReservedHost(host) => {
                Self::ReservedHost(require_nonempty("gone.reserved_host", host)?)
            }
            Key::Certificate(name) => {
                Self::Certificate(parse_certificate_name("gone.certificate", &name)?)
            }
            Key::ClientCa(name) => Self::ClientCa(parse_secret_name("gone.client_ca", &name)?),
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
            RouteKey::Replicas(component) => Key::Replicas(raw_server_component(component)),
            RouteKey::Settings => Key::Settings(raw::Empty {}),
            RouteKey::Node(name) => Key::Node(name),
            RouteKey::GatewayHost(key) => Key::GatewayHost(key.to_string()),
            RouteKey::ReservedHost(host) => Key::ReservedHost(host),
            RouteKey::Certificate(name) => Key::Certificate(name.to_string()),
            RouteKey::ClientCa(name) => Key::ClientCa(name.to_string()),
        };
        Self { key: Some(key) }
    }
}

impl TryFrom<raw::Service> for ServiceEntry {
    type Error = WireError;
    fn try_from(message: raw::Service) -> WireResult<Self> {
        let (uses_pod_ports, path) = (message.scaled.is_some(), message.path());
        let targets = parse_targets(message.targets)?;
        let (targets, connection_path) = match message.scaled {
            Some(scaled) => parse_scaled_port(scaled, &targets)?,
            None => (targets, parse_connection_path("service.path", path)?),
        };
        Ok(Self {
            name: message.name.parse()?,
            addresses: parse_addresses("service.addresses", &message.addresses)?,
            awaits_agents: message.awaits_agents,
            port: parse_port("service.port", message.port)?,
            activator_port: parse_port("service.activator_port", message.activator_port)?,
            targets,
            connection_path,
            hosts: message.hosts,
            gateway_rules: message
                .ingress
                .map(|rules| rules.try_into().map(Box::new))
                .transpose()?,
            protocol: parse_optional_protocol("service.protocol", message.protocol)?,
            uses_pod_ports,
            affinity: parse_optional_ms(message.affinity_ms),
            serves_local_tls: message.local_tls,
        })
    }
}

fn parse_targets(all: Vec<raw::Target>) -> WireResult<Vec<RouteTarget>> {
    let targets = all.into_iter().map(RouteTarget::try_from).collect::<WireResult<Vec<_>>>()?;
    let total: u32 = targets.iter().map(|target| u32::from(target.percent)).sum();
    // A service without targets is valid: it exists before its first Revision is ready, and answers 503.
    if !targets.is_empty() && total != 100 {
        return Err(WireError::new("service.targets", total, "percents must add up to 100"));
    }
    Ok(targets)
}

/// Returns targets and path of a port of a scaled Service. `others` are the targets beside `scaled`: none are allowed.
fn parse_scaled_port(
    message: raw::ScaledPort,
    others: &[RouteTarget],
) -> WireResult<(Vec<RouteTarget>, ConnectionPath)> {
    let connection_path = parse_connection_path("scaled.path", message.path())?;
    if !others.is_empty() {
        let rule = "must be empty for a port of a scaled Service";
        return Err(WireError::new("service.targets", others.len(), rule));
    }
    // Empty stands for none: names of Revisions are never empty.
    if message.revision.is_empty() {
        return Ok((Vec::new(), connection_path));
    }
    let revision = parse_revision_name(&message.revision)?;
    Ok((vec![RouteTarget { revision, percent: 100 }], connection_path))
}

impl From<ServiceEntry> for raw::Service {
    fn from(value: ServiceEntry) -> Self {
        let ServiceEntry { targets, connection_path, .. } = value;
        // An earlier release refuses a name with a port. Even if it did not, it would find no target here, and the path
        // through activators: it does not know `scaled`.
        let (targets, connection_path, scaled) = if value.uses_pod_ports {
            let scaled = raw_scaled_port(&targets, connection_path);
            (Vec::new(), ConnectionPath::Activator, Some(scaled))
        } else {
            (targets, connection_path, None)
        };
        Self {
            name: value.name.to_string(),
            addresses: value.addresses.into_iter().map(address_octets).collect(),
            awaits_agents: value.awaits_agents,
            port: value.port.get().into(),
            activator_port: value.activator_port.get().into(),
            targets: targets.into_iter().map(Into::into).collect(),
            path: raw_connection_path(connection_path),
            hosts: value.hosts,
            ingress: value.gateway_rules.map(|rules| (*rules).into()),
            scaled,
            affinity_ms: value.affinity.map_or(0, to_ms),
            protocol: value.protocol.map_or(raw::Protocol::Unspecified as i32, raw_protocol),
            local_tls: value.serves_local_tls,
        }
    }
}

fn raw_scaled_port(targets: &[RouteTarget], connection_path: ConnectionPath) -> raw::ScaledPort {
    debug_assert!(targets.len() <= 1, "a scaled Service has one Revision: {targets:?}");
    let revision = targets.first().map(|it| it.revision.to_string()).unwrap_or_default();
    raw::ScaledPort { revision, path: raw_connection_path(connection_path) }
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
        // Without its rule, a guarded host would be served to all clients.
        if message.guarded_domains.iter().any(|it| it.client_auth.is_none()) {
            return Err(WireError::new("ingress.guarded_domains", "", "must have client_auth"));
        }
        let domains = message.domains.into_iter().chain(message.guarded_domains);
        let unruled = domains.map(MappedDomain::try_from);
        let ruled = message.ruled_domains.into_iter().map(parse_ruled_domain);
        let passed = message.passthrough_domains.into_iter();
        let passed = passed.map(|it| parse_tcp_domain(it, DomainProtocol::TlsPassthrough));
        let of_tcp = message.tcp_domains.into_iter();
        let of_tcp = of_tcp.map(|it| parse_tcp_domain(it, DomainProtocol::TcpOverTls));
        let all = unruled.chain(ruled).chain(passed).chain(of_tcp);
        let mapped_domains = all.collect::<WireResult<_>>()?;
        let challenges = message.challenges.into_iter().map(HttpChallenge::try_from);
        let challenges = challenges.collect::<WireResult<_>>()?;
        Ok(Self {
            redirects_to_https: message.redirects,
            mapped_domains,
            tag_routing,
            challenges,
            reserved_hosts: message.reserved_hosts,
            gateway_port: parse_optional_port("ingress.gateway_port", message.gateway_port)?,
        })
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
        let mut lists: [Vec<raw::Domain>; 5] = Default::default();
        for domain in value.mapped_domains {
            // A domain with a condition is in a list of its own, which earlier releases ignore: they must not serve it
            // without the condition.
            let list = match domain.protocol {
                DomainProtocol::TcpOverTls => 4,
                DomainProtocol::TlsPassthrough => 3,
                DomainProtocol::Http if domain.path_rule.is_some() => 2,
                DomainProtocol::Http if domain.client_auth.is_some() => 1,
                DomainProtocol::Http => 0,
            };
            lists[list].push(domain.into());
        }
        let [domains, guarded_domains, ruled_domains, passthrough_domains, tcp_domains] = lists;
        Self {
            redirects: value.redirects_to_https,
            domains,
            guarded_domains,
            ruled_domains,
            passthrough_domains,
            tcp_domains,
            tags,
            challenges: value.challenges.into_iter().map(Into::into).collect(),
            gateway_port: value.gateway_port.map_or(0, |port| port.get().into()),
            reserved_hosts: value.reserved_hosts,
        }
    }
}

impl TryFrom<raw::HttpChallenge> for HttpChallenge {
    type Error = WireError;
    fn try_from(message: raw::HttpChallenge) -> WireResult<Self> {
        Ok(Self {
            host: require_nonempty("challenge.host", message.host)?,
            token: require_nonempty("challenge.token", message.token)?,
            response: require_nonempty("challenge.response", message.response)?,
        })
    }
}

impl From<HttpChallenge> for raw::HttpChallenge {
    fn from(value: HttpChallenge) -> Self {
        Self { host: value.host, token: value.token, response: value.response }
    }
}

/// Parses a domain of `ruled_domains`, whose empty prefix means all paths.
fn parse_ruled_domain(mut message: raw::Domain) -> WireResult<MappedDomain> {
    let (text, strips_prefix) = (std::mem::take(&mut message.path_prefix), message.strips_prefix);
    let prefix = match text.as_str() {
        "" => PathPrefix::ALL,
        text => PathPrefix::parse(text).map_err(|_fault| {
            WireError::new("domain.path_prefix", text, "must be a path prefix")
        })?,
    };
    let domain = MappedDomain::try_from(message)?;
    Ok(MappedDomain { path_rule: Some(PathRule { prefix, strips_prefix }), ..domain })
}

/// Parses a domain of raw TCP. A handshake shows no path, so that the domain has all paths.
fn parse_tcp_domain(message: raw::Domain, protocol: DomainProtocol) -> WireResult<MappedDomain> {
    let domain = MappedDomain::try_from(message)?;
    // Hosts below a wildcard are found by their rules only.
    let path_rule = wildcard_suffix(&domain.host).map(|_| PathRule::default());
    Ok(MappedDomain { protocol, path_rule, ..domain })
}

impl TryFrom<raw::Domain> for MappedDomain {
    type Error = WireError;
    /// Parses a domain that is not among `ruled_domains`.
    fn try_from(message: raw::Domain) -> WireResult<Self> {
        let host = require_nonempty("domain.host", message.host)?;
        if !message.path_prefix.is_empty() {
            let rule = "must be empty outside of ruled_domains";
            return Err(WireError::new("domain.path_prefix", message.path_prefix, rule));
        }
        // proto3 has no null for strings: empty stands for "as the client asked".
        let host_rewrite = (!message.rewrite.is_empty()).then_some(message.rewrite);
        // Empty stands for "chosen by its names".
        let named = Some(message.certificate).filter(|name| !name.is_empty());
        let certificate =
            named.map(|name| parse_secret_name("domain.certificate", &name)).transpose()?;
        Ok(Self {
            host,
            host_rewrite,
            redirects_to_https: message.redirects,
            certificate,
            client_auth: message.client_auth.map(ClientAuth::try_from).transpose()?,
            hsts: parse_hsts("domain.hsts", &message.hsts)?,
            path_rule: None,
            protocol: DomainProtocol::Http,
        })
    }
}

impl From<MappedDomain> for raw::Domain {
    fn from(value: MappedDomain) -> Self {
        let rewrite = value.host_rewrite.unwrap_or_default();
        let certificate = value.certificate.map(|name| name.to_string()).unwrap_or_default();
        let PathRule { prefix, strips_prefix } = value.path_rule.unwrap_or_default();
        Self {
            host: value.host,
            rewrite,
            redirects: value.redirects_to_https,
            certificate,
            client_auth: value.client_auth.map(Into::into),
            hsts: value.hsts.map(|it| it.as_str().to_owned()).unwrap_or_default(),
            path_prefix: prefix.as_str().to_owned(),
            strips_prefix,
        }
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
        Ok(Self { revision: parse_revision_name(&message.revision)?, percent })
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
        let timeout = parse_optional_ms(message.timeout_ms);
        Ok(Self {
            name: parse_revision_name(&message.name)?,
            service: message.service.into(),
            configuration: message.configuration.into(),
            container_concurrency: message.container_concurrency,
            timeout: timeout
                .ok_or_else(|| WireError::new("revision.timeout_ms", 0, "must be above 0"))?,
            response_start_timeout: parse_optional_ms(message.response_start_timeout_ms),
            idle_timeout: parse_optional_ms(message.idle_timeout_ms),
            protocol: parse_protocol("revision.protocol", message.protocol)?,
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
        Self {
            name: value.name.to_string(),
            service: value.service.into(),
            configuration: value.configuration.into(),
            container_concurrency: value.container_concurrency,
            timeout_ms: to_ms(value.timeout),
            response_start_timeout_ms: value.response_start_timeout.map_or(0, to_ms),
            idle_timeout_ms: value.idle_timeout.map_or(0, to_ms),
            protocol: raw_protocol(value.protocol),
            policy: value.policy.map(|policy| Arc::unwrap_or_clone(policy).into()),
            reachable: value.reachable,
            initial_scale_reached: value.initial_scale_reached,
            sources: value.allowed_sources.as_deref().map(raw::Sources::from),
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
            gets_all_reports: message.all_reports,
        })
    }
}

impl From<ActivatorEntry> for raw::Activator {
    fn from(value: ActivatorEntry) -> Self {
        Self {
            name: value.name,
            node: value.node,
            zone: value.zone,
            addresses: value.addresses.into_iter().map(address_octets).collect(),
            all_reports: value.gets_all_reports,
        }
    }
}

impl TryFrom<raw::Node> for NodeEntry {
    type Error = WireError;
    fn try_from(message: raw::Node) -> WireResult<Self> {
        let zone = require_nonempty("node.zone", message.zone)?.into();
        Ok(Self { name: require_nonempty("node.name", message.name)?, zone })
    }
}

impl From<NodeEntry> for raw::Node {
    fn from(value: NodeEntry) -> Self {
        Self { name: value.name, zone: value.zone.into() }
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
