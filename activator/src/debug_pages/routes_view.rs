//! Pure: the routes at one moment → the facts of the page `/debug/routes`.

use std::{borrow::Cow, collections::BTreeMap, num::NonZeroU16, sync::Arc};

use common::wire::{ConnectionPath, EdgeSettings, NamespacedName, TagRouting};

use crate::{
    revisions::{
        revision_snapshot::{MAX_SHOWN_PODS, RevisionSnapshot},
        route_settings::PodTable,
    },
    route_facts::{
        ActivatorFacts, ConnectionCounts, EdgeFacts, HostCertificateFacts, HostRouteFacts,
        HostRule, RevisionFacts, RoutesFacts, TargetShareFacts,
    },
    routes::{service::RoutedService, service_match::ServiceMatch},
    tls::certificate_snapshot::CertificateSnapshot,
};

/// Most hosts that the page lists.
pub(super) const MAX_HOSTS: usize = 1000;
/// Most pods that the page lists, of all Revisions together.
const MAX_PODS: usize = 5000;

/// Host of a service, or the name under which a service without a host is listed.
#[derive(Debug)]
pub(super) struct ListedHost<'a> {
    pub(super) name: Cow<'a, str>,
    /// Service without a host for requests from outside; `None`: the index of hosts knows the owner of the name.
    pub(super) private_service: Option<&'a Arc<RoutedService>>,
}

/// Host with the service to which it leads.
#[derive(Debug)]
pub(super) struct HostSnapshot {
    /// Host, with the prefix behind it if it has a path rule.
    pub(super) name: String,
    pub(super) service_match: ServiceMatch,
    /// True if the index of hosts has the name.
    pub(super) is_public: bool,
}

/// Routes at one moment, as far as a page lists them.
#[derive(Debug)]
pub(super) struct RoutesSnapshot {
    pub(super) activator: ActivatorFacts,
    pub(super) filter: String,
    pub(super) hosts: Vec<HostSnapshot>,
    /// Number of hosts that contain the filter.
    pub(super) all_hosts: usize,
    /// Revisions of the hosts.
    pub(super) revisions: BTreeMap<NamespacedName, (RevisionSnapshot, PodTable)>,
    pub(super) certificates: CertificateSnapshot,
    pub(super) connections: ConnectionCounts,
    pub(super) edge: Arc<EdgeSettings>,
}

/// Returns the hosts of services that contain `filter`, sorted and each once.
pub(super) fn list_hosts<'a>(
    services: &'a [Arc<RoutedService>],
    filter: &str,
) -> Vec<ListedHost<'a>> {
    let mut hosts: Vec<ListedHost<'a>> = services.iter().flat_map(hosts_of).collect();
    hosts.retain(|host| host.name.contains(filter));
    hosts.sort_unstable_by(|one, two| one.name.cmp(&two.name));
    hosts.dedup_by(|one, two| one.name == two.name);
    hosts
}

/// Returns the hosts of one service, or its name within the cluster if it has none.
fn hosts_of(service: &Arc<RoutedService>) -> Vec<ListedHost<'_>> {
    let public = (0..).map_while(|at| service.nth_listed_host(at));
    let public = public.map(|name| ListedHost { name, private_service: None });
    let mut hosts: Vec<ListedHost<'_>> = public.collect();
    if hosts.is_empty() {
        let mut name = format!("{}.{}.svc", service.kubernetes_name(), service.name.namespace);
        if let Some(port) = service.service_port {
            name += &format!(":{port}");
        }
        hosts.push(ListedHost { name: name.into(), private_service: Some(service) });
    }
    hosts
}

impl RoutesSnapshot {
    /// Returns the facts that the page shows.
    pub(super) fn into_facts(self) -> RoutesFacts {
        let hosts: Vec<HostRouteFacts> =
            self.hosts.iter().map(|it| it.facts(&self.certificates)).collect();
        let certificates = self.certificate_facts();
        // The page has bounds for each Revision and for all of them, so that its size is bounded.
        let mut pods_left = MAX_PODS;
        let revisions = self.revisions.iter().map(|(name, (snapshot, table))| {
            let facts = snapshot.facts(name, table, pods_left.min(MAX_SHOWN_PODS));
            pods_left -= facts.pods.len();
            facts
        });
        let revisions: Vec<RevisionFacts> = revisions.collect();
        RoutesFacts {
            activator: self.activator,
            filter: self.filter,
            is_cut: self.all_hosts > hosts.len(),
            all_hosts: self.all_hosts,
            hosts,
            revisions,
            certificates,
            connections: self.connections,
            edge: edge_facts(&self.edge),
        }
    }

    /// Returns the certificates that the listed hosts get, sorted by their names.
    fn certificate_facts(&self) -> Vec<HostCertificateFacts> {
        let chosen = self.hosts.iter().filter(|host| host.is_public).filter_map(|host| {
            let (certificate, _) = self.certificates.choose(host.named_secrets(), host.host())?;
            Some((certificate.name.as_str(), certificate))
        });
        let chosen: BTreeMap<&str, _> = chosen.collect();
        chosen.values().map(|it| it.page_facts()).collect()
    }
}

impl HostSnapshot {
    /// Returns the facts about one host. Only a public host has a certificate and policies.
    fn facts(&self, certificates: &CertificateSnapshot) -> HostRouteFacts {
        let service = &self.service_match.service;
        let targets = service.targets.iter().map(|it| TargetShareFacts {
            revision: it.revision.name.to_string(),
            percent: it.percent,
        });
        let tags = match service.tags() {
            Some(TagRouting::ChooseTag(tags)) => tags.iter().map(|it| it.name.clone()).collect(),
            Some(TagRouting::ServeTag(_)) | None => Vec::new(),
        };
        // Clients from inside the cluster get another certificate, by the service's name.
        let certificate =
            self.is_public.then(|| certificates.choice_facts(self.named_secrets(), self.host()));
        HostRouteFacts {
            host: self.name.clone(),
            rule: self.rule(),
            service: service.name.to_string(),
            path: path_name(service.path).to_owned(),
            targets: targets.collect(),
            redirects_to_https: self.is_public && self.service_match.redirects_to_https(),
            host_rewrite: self.service_match.domain().and_then(|it| it.host_rewrite.clone()),
            tags,
            certificate: certificate.flatten(),
            named_secret: self.named_secrets().first().map(ToString::to_string),
        }
    }

    /// Host without the prefix of a path rule.
    fn host(&self) -> &str {
        self.name.split('/').next().unwrap_or_default()
    }

    fn rule(&self) -> HostRule {
        let service = &self.service_match.service;
        if self.service_match.domain().is_some() {
            HostRule::DomainMapping
        } else if service.service_port.is_some() {
            HostRule::Port
        } else if !self.is_public {
            HostRule::ClusterName
        } else if matches!(service.tags(), Some(TagRouting::ServeTag(_))) {
            HostRule::Tag
        } else {
            HostRule::Route
        }
    }

    /// Secret that the DomainMapping of the host names, as a list of at most one.
    fn named_secrets(&self) -> &[NamespacedName] {
        let domain = self.service_match.domain();
        domain.map(|it| it.certificate.as_slice()).unwrap_or_default()
    }
}

fn path_name(path: ConnectionPath) -> &'static str {
    match path {
        ConnectionPath::Direct => "direct",
        ConnectionPath::Activator => "activator",
    }
}

fn edge_facts(edge: &EdgeSettings) -> EdgeFacts {
    EdgeFacts {
        trusted_proxies: edge.trusted_proxies.iter().map(ToString::to_string).collect(),
        requires_proxy_protocol: edge.requires_proxy_protocol,
        allowed_upgrades: edge.allowed_upgrades.clone(),
        allows_underscores: edge.allows_underscores,
        https_port: edge.https_port.map(NonZeroU16::get),
        trusted_ingresses: edge.trusted_ingresses.iter().map(ToString::to_string).collect(),
    }
}
