//! Pure: `config-network`: names of services, rollouts, gateways, and Rouse's own default path.
//!
//! Keys, defaults, bounds and messages: knative/networking `pkg/config/config.go` at 17b28c6.

use std::{collections::BTreeMap, num::NonZeroU16, time::Duration};

use common::{
    decimal::parse_port,
    wire::{
        ConnectionPath, EdgeSettings, HstsPolicy, TlsMinVersion, TlsSettings,
        is_allowed_upgrade_name, is_secret_name, parse_network,
    },
};
use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::{Selector, SelectorExt as _};

use super::{
    ConfigMapSettings,
    go_template::{GoTemplate, TemplateValues},
    keys::ConfigMapReader,
    port_ranges::PortRanges,
};
use crate::model::go_values::{GoDuration, parse_bool, parse_duration};

/// Knative's template of a public host name (`DefaultDomainTemplate`); always used for private ones.
pub const DOMAIN_TEMPLATE: &str = "{{.Name}}.{{.Namespace}}.{{.Domain}}";
/// Knative's template of a tag's host name (`DefaultTagTemplate`).
pub const TAG_TEMPLATE: &str = "{{.Tag}}-{{.Name}}";
/// Class of the certificates that the controller requests from cert-manager (`CertManagerCertificateClassName`).
pub const CERT_MANAGER_CLASS: &str = "cert-manager.certificate.networking.knative.dev";
/// Class of ingresses that is Rouse's own gateway.
pub const OWN_INGRESS_CLASS: &str = "rouse.ingress.networking.knative.dev";
/// Reason for which `system-internal-tls` has no effect.
const NO_SYSTEM_TLS: &str = "streams between Rouse's components always have TLS, and requests to pods have none, since \
                             no sidecar could end it: encrypt in the network of the pods";
/// Reason for which the type of a domain in `config-domain` has no effect.
pub(super) const NO_DOMAIN_TYPE: &str =
    "namespace-wildcard-cert-selector of config-network chooses namespaces with one certificate";
/// Texts that Go parses as false.
pub(super) const FALSE_TEXTS: [&str; 3] = ["false", "f", "0"];
/// Lowest idle deadline of raw TCP from outside.
const MIN_TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// Fields that a domain template may use.
const DOMAIN_FIELDS: [&str; 5] = ["Name", "Namespace", "Domain", "Annotations", "Labels"];
/// Fields that a tag template may use.
const TAG_FIELDS: [&str; 2] = ["Name", "Tag"];

/// Treatment of plain HTTP from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpProtocol {
    /// Plain HTTP is served.
    Enabled,
    /// Plain HTTP is redirected to HTTPS.
    Redirected,
}

/// `config-network`, checked against its bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkConfig {
    /// `domain-template` of host names; `None`: [`DOMAIN_TEMPLATE`].
    pub domain_template: Option<GoTemplate>,
    /// `tag-template` of host names; `None`: [`TAG_TEMPLATE`].
    pub tag_template: Option<GoTemplate>,
    /// `http-protocol`: treatment of plain HTTP. Default enabled.
    pub http_protocol: HttpProtocol,
    /// `rollout-duration` in whole seconds; zero: at once. Default 0.
    pub rollout_duration: Duration,
    /// `autocreate-cluster-domain-claims`: true if DomainMappings create their claims. Default false.
    pub autocreate_claims: bool,
    /// `default-external-scheme` of URLs without TLS. Default `http`.
    pub external_scheme: String,
    /// `rouse.dev.path`, Rouse's own: the path of services without an annotation; `None`: the path rule decides. (The
    /// annotation is `rouse.dev/path`; a key of a ConfigMap may not contain a slash.)
    pub default_path: Option<ConnectionPath>,
    /// `rouse.dev.certificates`, Rouse's own: Secrets of the system namespace, separated by commas or spaces. Each
    /// has a certificate for the hosts that it names, and the first one also for all other hosts. Default none.
    pub certificates: Vec<String>,
    /// `external-domain-tls`: true if certificates are requested for the hosts of Routes and DomainMappings. Default
    /// false.
    pub external_domain_tls: bool,
    /// `cluster-local-domain-tls`: true if names inside the cluster serve https. Default false.
    pub cluster_local_domain_tls: bool,
    /// `certificate-class` of requested certificates. Default [`CERT_MANAGER_CLASS`].
    pub certificate_class: String,
    /// `ingress-class`: ingress that fronts the public hosts of Routes without an annotation, if one is
    /// [trusted](Self::trusts_ingresses). Default [`OWN_INGRESS_CLASS`].
    pub ingress_class: String,
    /// `namespace-wildcard-cert-selector`: namespaces with one certificate for all their hosts. Default none.
    pub wildcard_namespaces: Option<LabelSelector>,
    /// Rouse's own settings of gateways: `rouse.dev.trusted-proxies`, networks separated by commas, default none;
    /// `rouse.dev.proxy-protocol`, default false; `rouse.dev.upgrades`, protocols besides WebSocket separated by
    /// commas, default none; `rouse.dev.underscores-in-headers`, default false; `rouse.dev.https-port`, the port of
    /// redirects to HTTPS, default that of the activator; `rouse.dev.hsts`, `Strict-Transport-Security`, default none;
    /// `rouse.dev.tls-min-version`, default 1.2; `rouse.dev.tls-ciphers`, IANA names separated by commas, default all;
    /// `rouse.dev.tls-strict-sni`, default false.
    /// `rouse.dev.tcp-idle-timeout`, the idle deadline of raw TCP from outside, default none.
    /// `rouse.dev.trusted-ingresses`, networks whose headers choose a Revision, default none. Its `certificates` are
    /// empty here.
    pub edge: EdgeSettings,
    /// `rouse.dev.gateway-ports`, Rouse's own: gateway ports that services may have, as ports and ranges separated by
    /// commas. Default none.
    pub gateway_ports: PortRanges,
}

impl Default for NetworkConfig {
    fn default() -> Self {
        Self {
            domain_template: None,
            tag_template: None,
            http_protocol: HttpProtocol::Enabled,
            rollout_duration: Duration::ZERO,
            autocreate_claims: false,
            external_scheme: "http".into(),
            default_path: None,
            certificates: Vec::new(),
            external_domain_tls: false,
            cluster_local_domain_tls: false,
            certificate_class: CERT_MANAGER_CLASS.into(),
            ingress_class: OWN_INGRESS_CLASS.into(),
            wildcard_namespaces: None,
            edge: EdgeSettings::default(),
            gateway_ports: PortRanges::default(),
        }
    }
}

impl NetworkConfig {
    /// Returns true if a namespace with these labels has one certificate for all its hosts.
    pub fn has_wildcard_certificate(&self, labels: &BTreeMap<String, String>) -> bool {
        let selector = self.wildcard_namespaces.clone().map(Selector::try_from);
        selector.is_some_and(|it| it.is_ok_and(|selector| selector.matches(labels)))
    }

    /// Returns true if an ingress of another controller is trusted. Without one, Rouse's gateway serves all Routes.
    pub fn trusts_ingresses(&self) -> bool {
        !self.edge.trusted_ingresses.is_empty()
    }
}

impl ConfigMapSettings for NetworkConfig {
    const NAME: &'static str = "config-network";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        accept_older_keys(keys);
        accept_system_tls_keys(keys);
        accept_mesh_keys(keys);
        let mut it = Self { cluster_local_domain_tls: read_local_tls(keys), ..Self::default() };
        keys.read_bool("autocreate-cluster-domain-claims", &mut it.autocreate_claims);
        keys.read_text("default-external-scheme", &mut it.external_scheme);
        it.rollout_duration = read_rollout_duration(keys);
        it.domain_template = read_domain_template(keys);
        it.tag_template = read_tag_template(keys);
        it.http_protocol = read_http_protocol(keys);
        it.default_path = read_default_path(keys);
        it.certificates = read_certificates(keys);
        it.external_domain_tls = read_external_domain_tls(keys);
        it.certificate_class = read_certificate_class(keys);
        it.wildcard_namespaces = read_wildcard_selector(keys);
        it.edge = read_edge_settings(keys);
        // After the edge settings, which name the trusted ingresses.
        it.ingress_class = read_ingress_class(keys, &it.edge);
        it.gateway_ports = read_gateway_ports(keys);
        it
    }
}

fn accept_older_keys(keys: &mut ConfigMapReader<'_>) {
    keys.accept_renamed(&[
        ("clusteringress.class", "ingress-class"),
        ("ingress.class", "ingress-class"),
        ("certificate.class", "certificate-class"),
        ("domainTemplate", "domain-template"),
        ("tagTemplate", "tag-template"),
        ("rolloutDuration", "rollout-duration"),
        ("autocreateClusterDomainClaims", "autocreate-cluster-domain-claims"),
        ("defaultExternalScheme", "default-external-scheme"),
        ("httpProtocol", "http-protocol"),
        ("autoTLS", "external-domain-tls"),
        ("auto-tls", "external-domain-tls"),
    ]);
    keys.accept_superseded(&[
        ("dataplane-trust", "system-internal-tls"),
        ("controlplane-trust", "system-internal-tls"),
    ]);
    let mesh = "there is no sidecar whose traffic could be left out";
    keys.accept_without_effect(&[("istio.sidecar.includeOutboundIPRanges", mesh)]);
}

fn read_rollout_duration(keys: &mut ConfigMapReader<'_>) -> Duration {
    let mut seconds = 0;
    keys.read_int64("rollout-duration", &mut seconds);
    if seconds < 0 {
        keys.add_error(format!("rollout-duration must be a positive integer, but was {seconds}"));
    }
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// Reads the class of certificates. Another controller has to serve any class but that of cert-manager.
fn read_certificate_class(keys: &mut ConfigMapReader<'_>) -> String {
    let mut class = String::new();
    keys.read_text("certificate-class", &mut class);
    if class.is_empty() { CERT_MANAGER_CLASS.into() } else { class }
}

/// Reads the class of ingresses. The gateway serves any class until another ingress is trusted.
fn read_ingress_class(keys: &mut ConfigMapReader<'_>, edge: &EdgeSettings) -> String {
    let mut class = String::new();
    keys.read_text("ingress-class", &mut class);
    if class.is_empty() {
        return OWN_INGRESS_CLASS.into();
    }
    if class != OWN_INGRESS_CLASS && edge.trusted_ingresses.is_empty() {
        keys.add_warning(format!(
            "ingress-class = {class:?} has no effect without rouse.dev.trusted-ingresses: the gateway serves all Routes"
        ));
    }
    class
}

/// Reads the switch of requested certificates. Knative treats any value but `enabled` as off, so none is refused.
fn read_external_domain_tls(keys: &mut ConfigMapReader<'_>) -> bool {
    let text = keys.get("external-domain-tls").unwrap_or_default().trim();
    text.eq_ignore_ascii_case("enabled")
}

/// Accepts settings of meshes: pods are always addressed directly, and other values get a warning.
fn accept_mesh_keys(keys: &mut ConfigMapReader<'_>) {
    const WHY: &str = "requests always go to pods by their own addresses";
    let mut addressable = false;
    keys.read_bool("enable-mesh-pod-addressability", &mut addressable);
    keys.warn_unless_usual("enable-mesh-pod-addressability", &FALSE_TEXTS, WHY);
    keys.warn_unless_usual("mesh-compatibility-mode", &["auto", "disabled"], WHY);
}

/// Reads the switch of https for names inside the cluster.
fn read_local_tls(keys: &mut ConfigMapReader<'_>) -> bool {
    let key = "cluster-local-domain-tls";
    check_encryption_value(keys, key);
    keys.get(key).is_some_and(|text| text.eq_ignore_ascii_case("enabled"))
}

/// Accepts settings of TLS between components, and refuses the values that Knative refuses.
fn accept_system_tls_keys(keys: &mut ConfigMapReader<'_>) {
    let key = "system-internal-tls";
    check_encryption_value(keys, key);
    keys.warn_unless_usual(key, &["disabled"], NO_SYSTEM_TLS);
    accept_internal_encryption(keys);
}

/// Reads the selector of namespaces with one certificate. `{}` selects all of them.
fn read_wildcard_selector(keys: &mut ConfigMapReader<'_>) -> Option<LabelSelector> {
    let key = "namespace-wildcard-cert-selector";
    let text = keys.get(key).unwrap_or_default();
    match serde_norway::from_str::<Option<LabelSelector>>(text) {
        Ok(selector) => {
            // Parsing accepts any operator, which would fail only at the first namespace.
            let is_valid = selector.clone().is_none_or(|it| Selector::try_from(it).is_ok());
            if !is_valid {
                keys.add_error(format!("failed to parse {key:?}: an operator cannot be used"));
            }
            selector
        }
        Err(error) => {
            keys.add_error(format!("failed to parse {key:?}: {error}"));
            None
        }
    }
}

fn read_domain_template(keys: &mut ConfigMapReader<'_>) -> Option<GoTemplate> {
    let source = keys.get("domain-template").map(str::trim)?;
    let read = GoTemplate::parse("domain-template", source, &DOMAIN_FIELDS);
    let tried = read.and_then(|template| {
        // As in Knative, sample values show now if the template gives no valid host.
        let no_pairs = || BTreeMap::<&str, &str>::new();
        let values = domain_values("foo", "bar", "baz.com", no_pairs(), no_pairs());
        check_host(&template.render(&values)?).map(|()| template)
    });
    accept_template(keys, tried)
}

/// Values for a domain template.
pub fn domain_values<'a>(
    name: &str,
    namespace: &str,
    domain: &str,
    annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
    labels: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> TemplateValues {
    let values =
        TemplateValues::default().with_text("Name", name).with_text("Namespace", namespace);
    values
        .with_text("Domain", domain)
        .with_map("Annotations", annotations)
        .with_map("Labels", labels)
}

fn read_tag_template(keys: &mut ConfigMapReader<'_>) -> Option<GoTemplate> {
    let source = keys.get("tag-template").map(str::trim)?;
    let read = GoTemplate::parse("tag-template", source, &TAG_FIELDS);
    let tried =
        read.and_then(|template| template.render(&tag_values("foo", "v2")).map(|_name| template));
    accept_template(keys, tried)
}

/// Values for a tag template.
pub fn tag_values(name: &str, tag: &str) -> TemplateValues {
    TemplateValues::default().with_text("Name", name).with_text("Tag", tag)
}

/// Unwraps a template, or reports its error.
fn accept_template(
    keys: &mut ConfigMapReader<'_>,
    tried: Result<GoTemplate, String>,
) -> Option<GoTemplate> {
    tried.map_err(|error| keys.add_error(error)).ok()
}

/// Refuses a text that cannot be the host of a URL.
fn check_host(host: &str) -> Result<(), String> {
    let (name, path) = host.split_at(host.find('/').unwrap_or(host.len()));
    if name.is_empty() {
        return Err("empty hostname".into());
    }
    if !path.is_empty() && path != "/" {
        return Err(format!("domain template has url path: {path}"));
    }
    match name.chars().find(|it| !it.is_ascii_alphanumeric() && !"-._".contains(*it)) {
        Some(invalid) => Err(format!("domain template gives {name:?}: {invalid:?} in host name")),
        None => Ok(()),
    }
}

fn read_http_protocol(keys: &mut ConfigMapReader<'_>) -> HttpProtocol {
    let text = keys.get("http-protocol").unwrap_or_default();
    match text.to_ascii_lowercase().as_str() {
        "" | "enabled" => HttpProtocol::Enabled,
        "redirected" => HttpProtocol::Redirected,
        // Knative serves no plain HTTP then. Here it remains served, so the operator gets a warning.
        "disabled" => {
            let instead = "plain HTTP is served: use \"Redirected\" to send it to HTTPS";
            keys.add_warning(format!("http-protocol = {text:?} has no effect: {instead}"));
            HttpProtocol::Enabled
        }
        _ => {
            keys.add_error(format!(
                "httpProtocol {text} in config-network ConfigMap is not supported"
            ));
            HttpProtocol::Enabled
        }
    }
}

fn check_encryption_value(keys: &mut ConfigMapReader<'_>, key: &'static str) {
    let text = keys.get(key).unwrap_or_default();
    if !["", "disabled", "enabled"].contains(&text.to_ascii_lowercase().as_str()) {
        let setting = format!("{key} with value: {text:?} in config-network ConfigMap");
        keys.add_error(format!("{setting} is not supported"));
    }
}

/// Accepts the key of releases before `system-internal-tls`.
fn accept_internal_encryption(keys: &mut ConfigMapReader<'_>) {
    let key = "internal-encryption";
    if let Some(Err(error)) = keys.get(key).map(parse_bool) {
        keys.add_error(format!("failed to parse {key:?}: {error}"));
    }
    keys.accept_superseded(&[(key, "system-internal-tls")]);
}

fn read_default_path(keys: &mut ConfigMapReader<'_>) -> Option<ConnectionPath> {
    let key = "rouse.dev.path";
    match keys.get(key) {
        None | Some("") => None,
        Some("direct") => Some(ConnectionPath::Direct),
        Some("activator") => Some(ConnectionPath::Activator),
        Some(other) => {
            keys.add_error(format!("{key} = {other:?}, must be \"direct\" or \"activator\""));
            None
        }
    }
}

fn read_certificates(keys: &mut ConfigMapReader<'_>) -> Vec<String> {
    let key = "rouse.dev.certificates";
    let mut names: Vec<String> = Vec::new();
    for text in split_list(keys, key) {
        if !is_secret_name(text) {
            keys.add_error(format!("{key} has {text:?}, must be names of Secrets"));
        } else if names.iter().any(|it| it == text) {
            keys.add_error(format!("{key} has {text:?} twice"));
        } else {
            names.push(text.to_owned());
        }
    }
    names
}

fn read_https_port(keys: &mut ConfigMapReader<'_>) -> Option<NonZeroU16> {
    let key = "rouse.dev.https-port";
    let text = keys.get(key).map(str::trim).filter(|it| !it.is_empty())?;
    let port = parse_port(text);
    if port.is_none() {
        keys.add_error(format!("{key} = {text:?}, must be 1 to 65535"));
    }
    port
}

fn read_hsts(keys: &mut ConfigMapReader<'_>) -> Option<HstsPolicy> {
    let key = "rouse.dev.hsts";
    let text = keys.get(key).map(str::trim).filter(|it| !it.is_empty())?;
    let policy = HstsPolicy::parse(text);
    policy.map_err(|fault| keys.add_error(format!("{key} = {text:?}: {fault}"))).ok()
}

fn read_tls(keys: &mut ConfigMapReader<'_>) -> TlsSettings {
    let (version_key, cipher_key) = ("rouse.dev.tls-min-version", "rouse.dev.tls-ciphers");
    let version = keys.get(version_key).map(str::trim).filter(|it| !it.is_empty());
    let min_version = version.map_or_else(|| Ok(TlsMinVersion::default()), TlsMinVersion::parse);
    let min_version =
        min_version.map_err(|fault| keys.add_error(format!("{version_key} = {fault}")));
    let ciphers = TlsSettings::parse_ciphers(split_list(keys, cipher_key));
    let ciphers = ciphers.map_err(|fault| keys.add_error(format!("{cipher_key} has {fault}")));
    let (Ok(min_version), Ok(ciphers)) = (min_version, ciphers) else {
        return TlsSettings::default();
    };
    let settings = TlsSettings { min_version, ciphers };
    if let Err(fault) = settings.check() {
        keys.add_error(format!("{cipher_key} has {fault}"));
    }
    // Elsewhere, such lists are often for TLS 1.2 alone.
    if !settings.ciphers.is_empty() && !settings.ciphers.iter().any(|it| it.is_of_tls13()) {
        keys.add_warning(format!("{cipher_key} has no cipher of TLS 1.3: clients get TLS 1.2"));
    }
    settings
}

/// Reads the settings for requests from outside, which are Rouse's own keys.
fn read_edge_settings(keys: &mut ConfigMapReader<'_>) -> EdgeSettings {
    let mut it = EdgeSettings::default();
    let key = "rouse.dev.trusted-proxies";
    it.trusted_proxies = read_networks(keys, key);
    // A network of all addresses is valid, but then headers of any client count as those of a proxy.
    if it.trusted_proxies.iter().any(|net| net.prefix_len() == 0) {
        keys.add_warning(format!(
            "{key} trusts every client: each may write its own address and protocol"
        ));
    }
    let switch = "rouse.dev.proxy-protocol";
    keys.read_bool(switch, &mut it.requires_proxy_protocol);
    // Without trusted proxies the header would be read from no peer at all.
    if it.requires_proxy_protocol && it.trusted_proxies.is_empty() {
        keys.add_error(format!("{switch} needs {key}: the header is read from no other peers"));
    }
    let key = "rouse.dev.upgrades";
    for text in split_list(keys, key) {
        let name = text.to_ascii_lowercase();
        if is_allowed_upgrade_name(&name) {
            it.allowed_upgrades.push(name);
        } else {
            keys.add_error(format!(
                "{key} has {text:?}, must be protocols to switch to, and never HTTP"
            ));
        }
    }
    keys.read_bool("rouse.dev.underscores-in-headers", &mut it.allows_underscores);
    it.https_port = read_https_port(keys);
    it.hsts = read_hsts(keys);
    it.tls = read_tls(keys);
    keys.read_bool("rouse.dev.tls-strict-sni", &mut it.is_sni_strict);
    it.tcp_idle_timeout = read_tcp_idle_timeout(keys);
    it.trusted_ingresses = read_trusted_ingresses(keys);
    it
}

/// Reads the networks of trusted ingresses. One of all addresses is valid, but then any client counts as an ingress.
fn read_trusted_ingresses(keys: &mut ConfigMapReader<'_>) -> Vec<IpNet> {
    let key = "rouse.dev.trusted-ingresses";
    let networks = read_networks(keys, key);
    if networks.iter().any(|net| net.prefix_len() == 0) {
        keys.add_warning(format!("{key} trusts every client: each may choose any Revision"));
    }
    networks
}

/// Reads networks, separated by commas or white space.
fn read_networks(keys: &mut ConfigMapReader<'_>, key: &'static str) -> Vec<IpNet> {
    let mut networks = Vec::new();
    for text in split_list(keys, key) {
        match parse_network(text) {
            Some(net) => networks.push(net),
            None => keys.add_error(format!("{key} has {text:?}, must be ADDRESS/LENGTH")),
        }
    }
    networks
}

/// Reads the idle deadline of raw TCP from outside. 0 and an empty text mean none.
fn read_tcp_idle_timeout(keys: &mut ConfigMapReader<'_>) -> Option<Duration> {
    let key = "rouse.dev.tcp-idle-timeout";
    let text = keys.get(key).map(str::trim).filter(|it| !it.is_empty())?;
    match parse_duration(text) {
        Ok(GoDuration(0)) => None,
        // Less would end connections between two messages of usual clients.
        Ok(span) if span.to_duration() >= MIN_TCP_IDLE_TIMEOUT => Some(span.to_duration()),
        Ok(_) | Err(_) => {
            keys.add_error(format!("{key} = {text:?}, must be 0, or 1s or more"));
            None
        }
    }
}

fn read_gateway_ports(keys: &mut ConfigMapReader<'_>) -> PortRanges {
    let key = "rouse.dev.gateway-ports";
    let ports = PortRanges::parse(split_list(keys, key));
    ports.unwrap_or_else(|entry| {
        keys.add_error(format!("{key} has {entry:?}, must be ports and ranges: 5432,6000-6100"));
        PortRanges::default()
    })
}

/// Entries of a key, separated by commas or white space.
fn split_list<'a>(
    keys: &mut ConfigMapReader<'a>,
    key: &'static str,
) -> impl Iterator<Item = &'a str> + use<'a> {
    let all = keys.get(key).unwrap_or_default().split([',', ' ', '\n']);
    all.map(str::trim).filter(|it| !it.is_empty())
}

#[cfg(test)]
mod tests;
