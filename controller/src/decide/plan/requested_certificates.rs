//! Pure: certificates that the platform requests for the hosts of Routes, DomainMappings and namespaces.
//!
//! As in Knative (knative/serving `pkg/reconciler/route/route.go`, `…/domainmapping` and `…/nscert`), with one
//! exception. While the certificate of a namespace is on its way, none is requested for a host of its own.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::{NamespacedName, wildcard_suffix};

use super::{
    domain_mappings::has_host,
    routes::{host_name_rules, public_host, serves_tcp},
};
use crate::{
    decide::host_names::RouteHostInputs,
    model::{
        cluster_state::{
            AppState, ClusterState, CompactStringMap, DomainMappingState, PlatformKind,
            RequestedCertificate, Uid,
        },
        go_values::parse_bool,
        knative::key,
        object::names::{child_name, label_value},
    },
};

/// Path below which authorities ask for tokens (RFC 8555, section 8.3).
pub const CHALLENGE_PATH: &str = "/.well-known/acme-challenge";

/// A certificate that is to be requested, by an object of the group `networking.internal.knative.dev`. Its Secret has
/// the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedCertificate {
    /// Name of the object and of its Secret.
    pub name: NamespacedName,
    /// Object that owns the certificate.
    pub owner: CertificateOwner,
    /// UID of the owner.
    pub owner_uid: Uid,
    /// Host of the certificate; `*.` begins that of a namespace.
    pub host: String,
    /// Domain below which the host is: of `config-domain`, or the host of a DomainMapping.
    pub domain: String,
    /// Class of the certificate.
    pub class: String,
}

/// Object that owns a requested certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CertificateOwner {
    /// The Route of this app, for its own name or a tag's.
    Route(NamespacedName),
    /// The DomainMapping of this name.
    Mapping(NamespacedName),
    /// The namespace of the certificate, for all names in it.
    Namespace,
}

/// Returns true if certificates are requested at all.
pub fn is_enabled(cluster: &ClusterState) -> bool {
    let settings = &cluster.settings;
    settings.platform == PlatformKind::Kubernetes
        && settings.config_maps.network.external_domain_tls
}

/// Returns true if certificates are requested for an object with these annotations.
fn is_enabled_for<'a>(
    cluster: &ClusterState,
    annotation: impl Fn(&str) -> Option<&'a str>,
) -> bool {
    let disabled = key::DISABLE_EXTERNAL_DOMAIN_TLS.iter().find_map(|key| annotation(key));
    is_enabled(cluster) && disabled.is_none_or(|text| parse_bool(text) != Ok(true))
}

/// Returns the class of an object's certificates, by its annotation or by `config-network`.
fn certificate_class<'a>(
    cluster: &ClusterState,
    annotation: impl Fn(&str) -> Option<&'a str>,
) -> String {
    let own = key::CERTIFICATE_CLASS.iter().find_map(|key| annotation(key));
    let class = own.filter(|it| !it.is_empty());
    class.unwrap_or(&cluster.settings.config_maps.network.certificate_class).to_owned()
}

/// Returns the name of the certificate of a Route, or of one of its tags (`certNameFromRouteAndTag`).
pub fn route_certificate_name(route_uid: Uid, tag: Option<&str>) -> String {
    match tag {
        None => format!("route-{route_uid}"),
        Some(tag) => format!("route-{route_uid}-{}", adler32(tag.as_bytes())),
    }
}

/// Returns the Adler-32 checksum of bytes (RFC 1950, section 8.2).
pub fn adler32(bytes: &[u8]) -> u32 {
    const MODULUS: u32 = 65_521;
    let (low, high) = bytes.iter().fold((1_u32, 0_u32), |(low, high), byte| {
        let low = (low + u32::from(*byte)) % MODULUS;
        (low, (high + low) % MODULUS)
    });
    high << 16 | low
}

/// Returns the tags of a Route's targets in force, and `None` for the Route itself, if it has targets.
pub(super) fn route_tags(app: &AppState) -> BTreeSet<Option<&str>> {
    let traffic = app.traffic();
    let own = traffic.first().map(|_| None);
    own.into_iter().chain(traffic.iter().map(|it| it.tag.as_deref())).collect()
}

/// Returns the certificates of the names of a Route that are to be requested one by one, whether they exist or not.
/// A name that the certificate of its namespace covers has none.
pub fn route_certificates(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Vec<WantedCertificate> {
    let all = possible_route_certificates(app, name, cluster).into_iter();
    all.filter(|it| namespace_certificate_of_host(it, cluster).is_none()).collect()
}

/// Returns the certificates that a Route would have if none of its namespace covered them.
pub(super) fn possible_route_certificates(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Vec<WantedCertificate> {
    let route = app.route.as_ref().filter(|it| it.meta.exists() && !it.is_terminating);
    let Some(route) = route.filter(|_| is_route_enabled(app, cluster)) else { return Vec::new() };
    let (labels, annotations) = (app.route_labels(), app.route_annotations());
    let inputs = RouteHostInputs {
        name: &name.name,
        namespace: &name.namespace,
        labels: &labels,
        annotations: &annotations,
    };
    let rules = host_name_rules(cluster);
    // By the Route's labels, which may choose another domain than the default one (`config-domain`).
    let domain = rules.matching_domain(&inputs).unwrap_or_default();
    let certificate = |tag: Option<&str>| {
        // With raw TCP a Route has no host of its own outside, so there is no name to certify.
        if serves_tcp(app, name, tag, cluster) {
            return None;
        }
        let own_name = route_certificate_name(route.meta.uid, tag);
        Some(WantedCertificate {
            name: NamespacedName::new(name.namespace.clone(), own_name),
            owner: CertificateOwner::Route(name.clone()),
            owner_uid: route.meta.uid,
            host: public_host(tag, app, name, cluster)?,
            domain: domain.to_owned(),
            class: certificate_class(cluster, |key| app.route_annotation(key)),
        })
    };
    route_tags(app).into_iter().filter_map(certificate).collect()
}

/// Returns true if certificates are requested for the names of a Route.
pub(super) fn is_route_enabled(app: &AppState, cluster: &ClusterState) -> bool {
    is_enabled_for(cluster, |key| app.route_annotation(key))
}

/// Returns true if certificates are requested for a mapping's host, as far as its own annotation decides.
pub(super) fn is_mapping_enabled(cluster: &ClusterState, mapping: &DomainMappingState) -> bool {
    is_enabled_for(cluster, |key| mapping.annotations.get(key))
}

/// Returns the name of the certificate of a mapped host, which all mappings of the host share. That of a long host is
/// cut.
pub fn host_certificate_name(namespace: &str, host: &str) -> NamespacedName {
    NamespacedName::new(namespace, child_name(host, ""))
}

/// Returns the certificate that is to be requested for a mapping's host. All mappings of the host share it, and one of
/// them owns it.
pub fn mapping_certificate(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> Option<WantedCertificate> {
    let host = &*mapping.domain.host;
    let (lead, state) = request_lead(cluster, &name.namespace, host)?;
    Some(WantedCertificate {
        name: host_certificate_name(&name.namespace, host),
        owner: CertificateOwner::Mapping(lead.clone()),
        owner_uid: state.meta.uid,
        host: host.to_owned(),
        domain: host.to_owned(),
        class: certificate_class(cluster, |key| state.annotations.get(key)),
    })
}

/// Returns the mapping that owns the requested certificate of a host: the present owner while it may be, else the
/// oldest. `None`: none is requested. Then a mapping of the host names a Secret, the namespace may not use the host, or
/// the host has a wildcard, which no authority checks by HTTP.
fn request_lead<'a>(
    cluster: &'a ClusterState,
    namespace: &str,
    host: &str,
) -> Option<(&'a NamespacedName, &'a DomainMappingState)> {
    let domains = &cluster.domains;
    let has_secret = domains.certificate_lead(namespace, host).is_some();
    if has_secret || wildcard_suffix(host).is_some() || !is_enabled(cluster) {
        return None;
    }
    let present = cluster.requests.certificates.get(&host_certificate_name(namespace, host));
    let present = present.and_then(|it| it.owner_uid);
    // A namespace that may not use the host would get its certificate all the same if the issuer checks it by DNS.
    let may_own = |(name, it): &(&NamespacedName, &DomainMappingState)| {
        let exists = it.meta.exists() && !it.is_terminating;
        // The server behind it has the certificate of a host whose TLS is passed through.
        let is_enabled = is_mapping_enabled(cluster, it) && !it.passes_tls;
        exists && is_enabled && has_host(cluster, name, it)
    };
    let all = domains.mappings_of_host(namespace, host).into_iter().filter(may_own);
    // Of equal keys the first one counts, which is the oldest.
    all.min_by_key(|(_, it)| present != Some(it.meta.uid))
}

/// Returns the certificate for all names of a namespace, if the operator wants one.
pub fn namespace_certificate(cluster: &ClusterState, namespace: &str) -> Option<WantedCertificate> {
    if !is_enabled(cluster) {
        return None;
    }
    // Without its UID, the request could not be owned by the namespace and deleted with it.
    let facts = cluster.requests.namespaces.get(namespace).filter(|it| it.uid != Uid(0))?;
    let network = &cluster.settings.config_maps.network;
    if !network.has_wildcard_certificate(&facts.labels) {
        return None;
    }
    let rules = host_name_rules(cluster);
    let (host, domain) = rules.wildcard_host(namespace)?;
    Some(WantedCertificate {
        name: NamespacedName::new(namespace, host.trim_start_matches("*.")),
        owner: CertificateOwner::Namespace,
        owner_uid: facts.uid,
        domain: domain.to_owned(),
        class: facts.class.as_deref().unwrap_or(&network.certificate_class).to_owned(),
        host,
    })
}

/// Returns the certificate that is to be requested under a name; `None`: no object wants it.
pub fn find_wanted(cluster: &ClusterState, name: &NamespacedName) -> Option<WantedCertificate> {
    let of_route = owner_route(cluster, name)
        .and_then(|app| Some((app.clone(), cluster.apps.get(&app)?)))
        .and_then(|(route, app)| {
            let all = route_certificates(app, &route, cluster);
            all.into_iter().find(|it| it.name == *name)
        });
    let of_mapping = || {
        let (mapping, state) = owner_mapping(cluster, name)?;
        mapping_certificate(cluster, mapping, state)
    };
    let of_namespace =
        || namespace_certificate(cluster, &name.namespace).filter(|it| it.name == *name);
    of_route.or_else(of_mapping).or_else(of_namespace)
}

/// Returns true if a certificate may go: no name of a Route needs it any more. That of a Route's name stays while the
/// certificate of the namespace takes its place, which may not be ready.
pub fn is_superfluous(cluster: &ClusterState, name: &NamespacedName) -> bool {
    if !is_enabled(cluster) || find_wanted(cluster, name).is_some() {
        return false;
    }
    let Some(route) = owner_route(cluster, name) else { return true };
    let Some(app) = cluster.apps.get(&route) else { return true };
    possible_route_certificates(app, &route, cluster).iter().all(|it| it.name != *name)
}

/// Returns the Route whose UID is in the name of a certificate.
pub fn owner_route(cluster: &ClusterState, name: &NamespacedName) -> Option<NamespacedName> {
    // A UID has 36 characters.
    let uid = Uid::parse(name.name.strip_prefix("route-")?.get(..36)?)?;
    let from = cluster.apps.range(NamespacedName::new(name.namespace.clone(), "")..);
    let mut apps = from.take_while(|(app, _)| app.namespace == name.namespace);
    let (app, _) = apps.find(|(_, app)| app.route.as_ref().is_some_and(|it| it.meta.uid == uid))?;
    Some(app.clone())
}

/// Returns a DomainMapping of the host whose certificate has a name. A long host is cut in it.
pub fn owner_mapping<'a>(
    cluster: &'a ClusterState,
    name: &NamespacedName,
) -> Option<(&'a NamespacedName, &'a DomainMappingState)> {
    let domains = &cluster.domains;
    let exact = domains.mappings_of_host(&name.namespace, &name.name).first().copied();
    exact.or_else(|| {
        let from = domains.mappings.range(NamespacedName::new(name.namespace.clone(), "")..);
        let mut own = from.take_while(|(it, _)| it.namespace == name.namespace);
        own.find(|(_, it)| child_name(&it.domain.host, "") == *name.name)
    })
}

/// Returns the name of the certificate of the namespace that covers a Route's host, requested or made by a user.
pub(super) fn namespace_certificate_of_host(
    wanted: &WantedCertificate,
    cluster: &ClusterState,
) -> Option<NamespacedName> {
    let namespace = wanted.name.namespace.as_str();
    let domain = label_value(&wanted.domain);
    let of_domain = |it: &RequestedCertificate| {
        it.wildcard_domain.as_deref() == Some(domain.as_str()) && it.covers(&wanted.host)
    };
    let mut observed = cluster.requests.of_namespace(namespace);
    let present = observed.find(|(_, it)| !it.is_terminating && of_domain(it));
    present.map(|(name, _)| name.clone()).or_else(|| {
        let below = wanted.host.split_once('.').map(|(_, domain)| domain);
        let own = namespace_certificate(cluster, namespace)?;
        let covers = own.domain == wanted.domain && own.host.strip_prefix("*.") == below;
        covers.then_some(own.name)
    })
}

/// Returns the annotations of a requested certificate's owner that it inherits.
pub fn inherited_annotations(
    cluster: &ClusterState,
    owner: &CertificateOwner,
) -> BTreeMap<String, String> {
    let mut all = match owner {
        CertificateOwner::Route(name) => {
            cluster.apps.get(name).map(|app| app.route_annotations()).unwrap_or_default()
        }
        CertificateOwner::Mapping(name) => {
            let mapping = cluster.domains.mappings.get(name);
            mapping.map(|it| CompactStringMap::to_btree_map(&it.annotations)).unwrap_or_default()
        }
        CertificateOwner::Namespace => BTreeMap::new(),
    };
    // Those of Rouse are about the owner itself, such as the hash of what was applied.
    let is_own = |key: &str| {
        key.starts_with("rouse.dev/")
            || key == "kubectl.kubernetes.io/last-applied-configuration"
            || key::CERTIFICATE_CLASS.contains(&key)
    };
    all.retain(|key, _| !is_own(key));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_certificates_are_those_of_knative() {
        let uid = Uid::parse("22b3de9e-076e-4e5d-a55d-aff10002527f").expect("a UID");
        let own = "route-22b3de9e-076e-4e5d-a55d-aff10002527f";
        assert_eq!(route_certificate_name(uid, None), own);
        // The sum of `Wikipedia` is the example of most texts about Adler-32.
        assert_eq!(route_certificate_name(uid, Some("Wikipedia")), format!("{own}-300286872"));
        assert_eq!(adler32(b""), 1);
    }
}
