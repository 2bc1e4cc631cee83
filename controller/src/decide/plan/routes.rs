//! Pure: Revisions, pods and shares → subjects of the RouteTable.

use std::{net::SocketAddr, num::NonZeroU16, sync::Arc};

use common::wire::{
    self, AppProtocol, ClientComponent, ConnectionPath, DomainProtocol, GatewayRules, MappedDomain,
    NamespacedName, PodEntry, RouteChange, RouteTag, RouteTarget, RoutingPhase, ServiceEntry,
    TagRouting,
};
use tracing::debug;

use super::{
    RevisionPlanContext, ServingAddresses, domain_mappings, gateway_ports, host_certificates,
    ingresses, local_tls, readiness, requested_certificates, revision_conditions, scale, standby,
    traffic,
};
use crate::{
    decide::host_names::{HostNameRules, RouteHost, RouteHostInputs},
    model::{
        cluster_state::{
            self, AppRevision, AppState, ClusterState, ConditionType, KubeletReadiness,
            ObservedChallenge, ParsedTemplate, PodStage, RouteNameAllocation, RoutingState,
            name_registry::NameClaimant,
        },
        config_maps::{Flag, network::HttpProtocol},
        knative::{key, user_container::USER_PORT_NAME},
        network_policies::PolicyPort,
        object::names::tagged_name,
    },
    read::parse::RESPONSE_START_TIMEOUT_S,
};

/// Port of every service (`http`).
const SERVICE_PORT: NonZeroU16 = NonZeroU16::new(80).expect("not zero");

/// Returns all subjects of one app.
pub(super) fn route_subjects(
    app: &AppState,
    name: &NamespacedName,
    templates: &[Arc<ParsedTemplate>],
    cluster: &ClusterState,
) -> Vec<RouteChange> {
    let mut out = Vec::new();
    let is_leaving = app.cascades_deletion(cluster.settings.platform);
    let pairs = || app.revisions.iter().zip(templates);
    // A Revision in reserve without pods is left out: no Route names it, and nothing of it runs. One that has not
    // reached its initial scale is in the table, since the autoscaler must start it.
    // Another ingress may send requests to a Revision for a while after its Route has left it.
    let is_fronted = ingresses::is_fronted(app, name, cluster);
    let shown = |pair: &&(&AppRevision, &Arc<ParsedTemplate>)| {
        let starts = !pair.0.scaling.initial_scale_reached && !is_leaving;
        let has_pods = !pair.0.pods.is_empty();
        let is_routed = is_fronted || pair.0.routing.state != RoutingState::Reserve;
        has_pods || !pair.0.is_deleted && (is_routed || starts)
    };
    for (revision, template) in pairs().filter(|it| shown(&it)) {
        let labels = || template.pod_labels(name, revision);
        let policies = &cluster.network_policies;
        // The only named port of a Revision's pods is the serving one.
        let port = PolicyPort { number: template.port.get(), name: USER_PORT_NAME };
        let sources = policies.admitted_sources(&name.namespace, labels, port);
        out.push(RouteChange::Revision(wire::RevisionEntry {
            allowed_sources: sources,
            ..template.to_wire(name, revision)
        }));
    }
    for (revision, template) in pairs() {
        let context = RevisionPlanContext::without_time(cluster, &name.namespace, template);
        let pods = revision.pods.iter().filter_map(|it| pod_subject(it, revision, &context));
        out.extend(pods.map(|it| RouteChange::Pod(it.into())));
    }
    // A service that is deleted on the local node loses its routes at once, while its pods drain.
    if is_leaving {
        return out;
    }
    for allocation in app.allocations() {
        let subject = service_subject(allocation, app, name, templates, cluster);
        out.push(RouteChange::Service(subject));
    }
    out
}

/// Returns a pod as a subject of the RouteTable; `None` once it was asked to stop on the local node.
pub(super) fn pod_subject(
    pod: &cluster_state::RevisionPod,
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> Option<PodEntry> {
    let phase = match pod.stage {
        PodStage::Serving if readiness::is_pod_ready(pod, context) => RoutingPhase::Ready,
        PodStage::Serving => RoutingPhase::Starting,
        PodStage::Draining { .. } => RoutingPhase::Draining,
        // Kubernetes stops pods later, and until then the agent answers the preStop hook by this entry.
        PodStage::Stopping { .. } if pod.kube_status.is_some() => RoutingPhase::Draining,
        PodStage::Stopping { .. } => return None,
    };
    let (address, other_family_address) = pod_addresses(pod, context);
    let own_template = context.own_template(pod);
    let template = own_template.as_deref().unwrap_or(context.template);
    Some(PodEntry {
        uid: pod.uid.to_string(),
        name: pod.name.to_string(),
        revision: context.revision_key(revision),
        node: context.node(pod).to_owned(),
        zone: context.zone(pod),
        hints: revision.topology_hints(&pod.name),
        phase,
        address,
        other_family_address,
        kubelet_ready: pod
            .kube_status
            .as_ref()
            .is_some_and(|it| it.kubelet_readiness == KubeletReadiness::Ready),
        awaits_report: readiness::awaits_report(pod, context),
        port: template.port,
        probe: template.agent_probe(),
        ports: pod.layout.as_ref().map(|it| it.ports.to_vec()).unwrap_or_default(),
        keeps_binds: pod.layout.is_some(),
        standby: standby::pod_order(pod, context),
        container_restarts: is_container_restarting(pod, context),
    })
}

/// Returns true if the kubelet of a pod has asked to stop a container, and is known not to end the pod.
fn is_container_restarting(
    pod: &cluster_state::RevisionPod,
    context: &RevisionPlanContext<'_>,
) -> bool {
    let report = context.cluster.pods.reports.get(&*pod.uid);
    let goes_on = match &pod.kube_status {
        Some(status) => pod.restarts_container && !status.is_terminating && !status.is_disrupted,
        // Pods of the local node end only by the controller's own order.
        None => true,
    };
    goes_on && pod.stage == PodStage::Serving && report.is_some_and(|it| it.awaits_stop)
}

/// Returns the addresses of a pod: as an agent reports them, else as Kubernetes or the local node does.
pub(super) fn pod_addresses(
    pod: &cluster_state::RevisionPod,
    context: &RevisionPlanContext<'_>,
) -> ServingAddresses {
    let report = context.cluster.pods.reports.get(&*pod.uid);
    let status = context.cluster.pods.statuses.get(&*pod.uid);
    let ip = status.and_then(|it| it.addresses.first().copied());
    let port = || context.own_template(pod).map_or(context.template.port, |it| it.port);
    let address = report
        .and_then(|report| report.address)
        .or(pod.restored_address)
        .or_else(|| ip.map(|ip| SocketAddr::new(ip, port().get())));
    (address, report.and_then(|report| report.other_family_address))
}

/// Returns the subject of a Route's name: its addresses, its Revisions, its path and its rules at gateways.
fn service_subject(
    allocation: &RouteNameAllocation,
    app: &AppState,
    name: &NamespacedName,
    templates: &[Arc<ParsedTemplate>],
    cluster: &ClusterState,
) -> ServiceEntry {
    let settings = &cluster.settings;
    let service_name = placeholder_name(allocation, &name.name);
    let shares = name_shares(app, allocation.tag.as_deref());
    let is_tcp = serves_tcp(app, name, allocation.tag.as_deref(), cluster);
    // The direct path exists only to a single Revision: the kernel cannot divide connections by percent.
    let only_revision = match shares.as_slice() {
        [(revision, _)] => find_revision(revision, app, name, templates, cluster),
        _ => None,
    };
    let context_for =
        |template| RevisionPlanContext::without_time(cluster, &name.namespace, template);
    let fails_fast = only_revision.as_ref().is_some_and(|(revision, template)| {
        revision_conditions::should_fail_fast(revision, &context_for(template))
    });
    let target = |(revision, percent): &(&str, u8)| RouteTarget {
        revision: NamespacedName::new(name.namespace.clone(), *revision),
        percent: *percent,
    };
    // Bytes of any protocol name no host, by which a gateway could find their service. A port of the gateway can.
    let rules = match is_tcp {
        true => tcp_gateway_rules(allocation, app, name, &service_name, cluster),
        false => gateway_rules(allocation, app, name, &service_name, cluster),
    };
    let public_host = public_host(allocation.tag.as_deref(), app, name, cluster)
        .filter(|_| !is_tcp && ingresses::is_served_by_gateway(app))
        .filter(|host| !has_domain(rules.as_deref(), host));
    // Requests for a service without targets get 503 at once.
    let targets = if fails_fast { Vec::new() } else { shares.iter().map(target).collect() };
    let addresses = settings.cluster_ips(&allocation.cluster_ips);
    let entry_name = NamespacedName::new(name.namespace.clone(), service_name.as_str());
    ServiceEntry {
        // Without an address there is nothing yet that an agent could lead.
        awaits_agents: !addresses.is_empty() && awaits_agents(app, cluster),
        addresses,
        port: SERVICE_PORT,
        activator_port: NonZeroU16::new(allocation.activator_port).unwrap_or(SERVICE_PORT),
        targets,
        connection_path: only_revision
            .as_ref()
            // An activator must read the header.
            .filter(|_| is_tcp || !has_tag_header_routing(app, cluster))
            .map_or(ConnectionPath::Activator, |(revision, template)| {
                connection_path(app, revision, template.protocol, &context_for(template))
            }),
        hosts: public_host.into_iter().collect(),
        gateway_rules: rules,
        protocol: is_tcp.then_some(AppProtocol::Tcp),
        uses_pod_ports: false,
        // Only a user of the Service sets it.
        affinity: cluster.names.placeholders.get(&entry_name).and_then(|it| it.affinity),
        serves_local_tls: !is_tcp && local_tls::is_enabled(cluster),
        name: entry_name,
    }
}

/// Returns the host by which clients outside reach a name of a Route. `None`: it has none, or another object owns it.
pub(super) fn public_host(
    tag: Option<&str>,
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Option<String> {
    let host = route_host(app, name, tag, cluster)?;
    let owner = cluster.names.registry.host_owner(&host.host, &cluster.names.placeholders)?;
    let is_public = !host.is_private && owner.claimant == NameClaimant::Route(name.clone());
    is_public.then_some(host.host)
}

/// Returns true if a DomainMapping has the host, with rules of its own.
fn has_domain(rules: Option<&GatewayRules>, host: &str) -> bool {
    rules.is_some_and(|it| it.mapped_domains.iter().any(|domain| domain.host == host))
}

/// Returns true if agents are to report that they lead connects to the Route's names, because it is not ready before.
fn awaits_agents(app: &AppState, cluster: &ClusterState) -> bool {
    !app.conditions.is_true(ConditionType::RouteIngress)
        && cluster.pods.reporters.has_complete_list(ClientComponent::Agent)
}

/// Returns the Revisions behind a Route's own name or the name of a tag, each with its percent.
pub(super) fn name_shares<'a>(app: &'a AppState, tag: Option<&str>) -> Vec<(&'a str, u8)> {
    let Some(tag) = tag else { return traffic::revision_shares(app.traffic()) };
    let tagged = app.traffic().iter().find(|it| it.tag.as_deref() == Some(tag));
    tagged.map(|it| (&*it.revision_name, 100)).into_iter().collect()
}

/// Returns true if connections to a name of a Route carry bytes of any protocol, since a Revision behind it speaks
/// `tcp`. Before any Revision has traffic, the latest one decides.
///
/// An activator must know it before it reads from the client. So with several Revisions, the HTTP of another one is
/// passed on as bytes, too.
pub(crate) fn serves_tcp(
    app: &AppState,
    name: &NamespacedName,
    tag: Option<&str>,
    cluster: &ClusterState,
) -> bool {
    let is_tcp = |revision: &AppRevision| {
        ParsedTemplate::of_revision(revision, cluster).protocol == AppProtocol::Tcp
    };
    let shares = name_shares(app, tag);
    // Before any traffic, connections already wait, and must not be read as HTTP.
    if shares.is_empty() {
        return app.latest_created().is_some_and(is_tcp);
    }
    shares.iter().any(|(revision, _)| {
        let own = app.revision(revision);
        own.or_else(|| cluster.revision(&name.namespace, revision)).is_some_and(is_tcp)
    })
}

/// Returns true if the header `Knative-Serving-Tag` selects among the tags of this app's Route.
fn has_tag_header_routing(app: &AppState, cluster: &ClusterState) -> bool {
    let is_enabled =
        cluster.settings.config_maps.features.tag_header_based_routing == Flag::Enabled;
    is_enabled && app.allocations().iter().any(|it| it.tag.is_some())
}

/// Returns the rules of a name for activators as gateways: redirects, domains, and selection of tags.
fn gateway_rules(
    allocation: &RouteNameAllocation,
    app: &AppState,
    name: &NamespacedName,
    service_name: &str,
    cluster: &ClusterState,
) -> Option<Box<GatewayRules>> {
    let http_protocol = key::HTTP_PROTOCOL.iter().find_map(|key| app.route_annotation(key));
    let tag = |tagged: &RouteNameAllocation| {
        let service =
            NamespacedName::new(name.namespace.clone(), placeholder_name(tagged, &name.name));
        tagged.tag.as_ref().map(|tag| RouteTag { name: tag.to_string(), service })
    };
    let sorted_tags = || {
        let mut all: Vec<RouteTag> = app.allocations().iter().filter_map(tag).collect();
        // Each replica observes the names in another order, and all replicas must send the same table.
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    };
    let tags = has_tag_header_routing(app, cluster).then(|| match &allocation.tag {
        None => TagRouting::ChooseTag(sorted_tags()),
        Some(tag) => TagRouting::ServeTag(tag.to_string()),
    });
    let redirects_to_https = is_http_redirected(http_protocol, cluster);
    let service = NamespacedName::new(name.namespace.clone(), service_name);
    let mut mapped_domains = domain_mappings::mapped_domains(cluster, &service, false);
    if let Some((host, certificate)) = own_host_with_certificate(allocation, app, name, cluster) {
        // The rules of a mapping of the same host come first.
        match mapped_domains.iter_mut().find(|it| it.host == host) {
            Some(mapped) => mapped.certificate = mapped.certificate.take().or(Some(certificate)),
            None => mapped_domains.push(MappedDomain {
                host,
                host_rewrite: None,
                redirects_to_https,
                certificate: Some(certificate),
                client_auth: None,
                hsts: None,
                path_rule: None,
                protocol: DomainProtocol::Http,
            }),
        }
    }
    let rules = GatewayRules {
        redirects_to_https,
        challenges: challenges(allocation, app, name, &mapped_domains, cluster),
        reserved_hosts: Vec::new(),
        mapped_domains,
        tag_routing: tags,
        gateway_port: None,
    };
    (rules != GatewayRules::default()).then(|| Box::new(rules))
}

/// Returns the rules of a name that serves raw TCP: its domains, challenges for their certificates, and its gateway
/// port. Only a Route's own name may have a gateway port.
fn tcp_gateway_rules(
    allocation: &RouteNameAllocation,
    app: &AppState,
    name: &NamespacedName,
    service_name: &str,
    cluster: &ClusterState,
) -> Option<Box<GatewayRules>> {
    let service = NamespacedName::new(name.namespace.clone(), service_name);
    let gateway_port = match allocation.tag {
        None => gateway_ports::owned_port(app, name, cluster),
        Some(_) => None,
    };
    let mapped_domains = domain_mappings::mapped_domains(cluster, &service, true);
    let rules = GatewayRules {
        challenges: challenges(allocation, app, name, &mapped_domains, cluster),
        mapped_domains,
        gateway_port,
        ..GatewayRules::default()
    };
    // A name without any of these needs no entry at the gateway.
    (rules != GatewayRules::default()).then(|| Box::new(rules))
}

/// Returns the public host of a Route's name, with the Secret whose requested certificate serves it. Only hosts with
/// rules of their own name a certificate in the RouteTable.
fn own_host_with_certificate(
    allocation: &RouteNameAllocation,
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Option<(String, NamespacedName)> {
    if !requested_certificates::is_enabled(cluster) || !ingresses::is_served_by_gateway(app) {
        return None;
    }
    let host = public_host(allocation.tag.as_deref(), app, name, cluster)?;
    let secret = host_certificates::secret_of_route(app, name, &host, cluster)?;
    Some((host, secret))
}

/// Returns the challenges of authorities for the hosts of a Route's name. The certificate of a long host has a second
/// one, `k.` and the domain of the host. If an object has that host, only its own challenges count.
fn challenges(
    allocation: &RouteNameAllocation,
    app: &AppState,
    name: &NamespacedName,
    mapped_domains: &[MappedDomain],
    cluster: &ClusterState,
) -> Vec<wire::HttpChallenge> {
    if cluster.requests.challenges.is_empty() || !requested_certificates::is_enabled(cluster) {
        return Vec::new();
    }
    // A host that is too long for a common name is requested with a short one, which authorities then check, too.
    let own = public_host(allocation.tag.as_deref(), app, name, cluster);
    let is_short = |host: &str, own: &str| {
        host.strip_prefix("k.")
            .and_then(|domain| own.strip_suffix(domain))
            .is_some_and(|it| it.ends_with('.'))
    };
    let registry = &cluster.names.registry;
    let is_free = |host: &str| registry.host_owner(host, &cluster.names.placeholders).is_none();
    let is_own = |host: &str| {
        own.as_deref().is_some_and(|own| own == host || (is_short(host, own) && is_free(host)))
            || mapped_domains.iter().any(|it| it.host == host)
    };
    let all = cluster.requests.challenges_of(&name.namespace, is_own).into_iter();
    let challenge = |it: &ObservedChallenge| wire::HttpChallenge {
        host: it.host.clone(),
        token: it.token.clone(),
        response: it.response.clone(),
    };
    all.map(challenge).collect()
}

/// Returns true if external plain HTTP is redirected to HTTPS: by the object's annotation, else by `config-network`
/// (knative/serving `pkg/networking/ingress.go`, `GetHTTPOption`).
pub(super) fn is_http_redirected(annotation: Option<&str>, cluster: &ClusterState) -> bool {
    match annotation {
        Some(annotation) => annotation.eq_ignore_ascii_case("redirected"),
        None => cluster.settings.config_maps.network.http_protocol == HttpProtocol::Redirected,
    }
}

/// Finds a Revision and its template; a Route without a Service may name Revisions of other apps.
fn find_revision<'a>(
    revision: &str,
    app: &'a AppState,
    name: &NamespacedName,
    templates: &[Arc<ParsedTemplate>],
    cluster: &'a ClusterState,
) -> Option<(&'a AppRevision, Arc<ParsedTemplate>)> {
    let mut revisions = app.revisions.iter().zip(templates);
    match revisions.find(|(it, _)| *it.name == *revision) {
        Some((revision, template)) => Some((revision, Arc::clone(template))),
        None => {
            let other = cluster.revision(&name.namespace, revision)?;
            Some((other, ParsedTemplate::of_revision(other, cluster)))
        }
    }
}

/// Returns the settings in force from which host names follow.
pub(super) fn host_name_rules(cluster: &ClusterState) -> HostNameRules<'_> {
    let settings = &cluster.settings;
    HostNameRules {
        network: &settings.config_maps.network,
        domain: &settings.config_maps.domain,
        default_domain: &settings.external_domain,
        cluster_domain: &settings.cluster_domain,
        private_scheme: local_tls::scheme(cluster),
    }
}

/// Returns the host of a Route or of one of its tags, by the settings in force. `None`: no valid name results, and the
/// Route is not reachable from outside.
pub(crate) fn route_host(
    app: &AppState,
    name: &NamespacedName,
    tag: Option<&str>,
    cluster: &ClusterState,
) -> Option<RouteHost> {
    let rules = host_name_rules(cluster);
    let (labels, annotations) = (&app.route_labels(), &app.route_annotations());
    let (route_name, namespace) = (name.name.as_str(), name.namespace.as_str());
    let route = RouteHostInputs { name: route_name, namespace, labels, annotations };
    let is_private_placeholder = |service: &str| {
        let placeholder = cluster.names.placeholders.get(&NamespacedName::new(namespace, service));
        placeholder.is_some_and(|it| it.is_cluster_local)
    };
    let host = rules.route_host(&route, tag, is_private_placeholder);
    host.inspect_err(|error| debug!(route = %name, why = %error, "route has no valid host")).ok()
}

/// Returns the name of the Kubernetes Service: `<route>` or `<tag>-<route>`.
pub(crate) fn placeholder_name(allocation: &RouteNameAllocation, route: &str) -> String {
    tagged_name(allocation.tag.as_deref(), route)
}

/// Returns true if no request to a Revision must pass an activator while it has pods.
pub(crate) fn is_direct_path(
    app: &AppState,
    name: &NamespacedName,
    revision: &AppRevision,
    cluster: &ClusterState,
) -> bool {
    let template = ParsedTemplate::of_revision(revision, cluster);
    let context = RevisionPlanContext::without_time(cluster, &name.namespace, &template);
    let shares = traffic::revision_shares(app.traffic());
    let is_split = shares.len() > 1 && shares.iter().any(|(shared, _)| **shared == *revision.name);
    !is_split
        && (template.protocol == AppProtocol::Tcp || !has_tag_header_routing(app, cluster))
        && connection_path(app, revision, template.protocol, &context) == ConnectionPath::Direct
}

/// Returns the path of connections of this protocol to the one Revision that has all traffic.
///
/// The activator path is required with a hard limit, for which only activators have queues, and with time limits that
/// only activators enforce. It is the default with h2c, whose requests activators balance one by one. Burst capacity
/// decides the rest.
pub(super) fn connection_path(
    app: &AppState,
    revision: &AppRevision,
    protocol: AppProtocol,
    context: &RevisionPlanContext<'_>,
) -> ConnectionPath {
    let annotation =
        app.route_annotation(key::PATH).or_else(|| context.template.annotation(key::PATH));
    let configs = &context.cluster.settings.config_maps;
    let requested_path = annotation.or_else(|| {
        configs.network.default_path.map(|path| match path {
            ConnectionPath::Direct => "direct",
            ConnectionPath::Activator => "activator",
        })
    });
    let spec = &context.template.raw.spec;
    // The shipped default is not the user's request for a limit.
    let start_timeout = spec
        .response_start_timeout_seconds
        .filter(|it| *it != 0 && *it != RESPONSE_START_TIMEOUT_S);
    let idle_timeout = spec.idle_timeout_seconds.filter(|it| *it != 0);
    let is_balanced_h2c = protocol == AppProtocol::H2c && requested_path != Some("direct");
    let is_logged = configs.observability.needs_activator();
    // Bytes of any protocol have no responses, which these settings are about.
    let has_responses = protocol != AppProtocol::Tcp;
    let needs_activator = context.template.container_concurrency > 0
        || is_balanced_h2c
        || (has_responses && (start_timeout.is_some() || idle_timeout.is_some() || is_logged));
    if requested_path == Some("activator") || needs_activator {
        return ConnectionPath::Activator;
    }
    scale::burst_path(revision, context)
}
