//! Pure: `config-network`: names of services, TLS, rollouts, and Rouse's own default path.
//!
//! Keys, defaults, bounds and messages: knative/networking `pkg/config/config.go` at 17b28c6.

use std::{collections::BTreeMap, time::Duration};

use common::wire::{Edge, Path, is_upgrade, network};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::{
    ConfigMap,
    go::parse_bool,
    keys::Keys,
    template::{Template, Values},
};

/// Knative's name of a public service (`DefaultDomainTemplate`); always that of a private one.
pub const DOMAIN_TEMPLATE: &str = "{{.Name}}.{{.Namespace}}.{{.Domain}}";
/// Knative's name of a tag (`DefaultTagTemplate`).
pub const TAG_TEMPLATE: &str = "{{.Tag}}-{{.Name}}";
/// What a domain template may name.
const DOMAIN_FIELDS: [&str; 5] = ["Name", "Namespace", "Domain", "Annotations", "Labels"];
/// What a tag template may name.
const TAG_FIELDS: [&str; 2] = ["Name", "Tag"];

/// What plain HTTP gets from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpProtocol {
    /// It is served.
    Enabled,
    /// It is refused.
    Disabled,
    /// It is sent to HTTPS.
    Redirected,
}

/// Whether pods are asked by their own addresses or by their Service's (`mesh-compatibility-mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeshMode {
    /// By the Service's.
    Enabled,
    /// By their own.
    Disabled,
    /// Whatever works.
    Auto,
}

/// `config-network`, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// `ingress-class`. Read by other ingresses; the gateway here serves every class. Default Knative's Istio.
    pub ingress_class: String,
    /// `certificate-class`. Default cert-manager.
    pub certificate_class: String,
    /// `namespace-wildcard-cert-selector`; `None`: no namespace. Default `None`.
    pub wildcard_selector: Option<LabelSelector>,
    /// `domain-template`; `None`: [`DOMAIN_TEMPLATE`].
    pub domain_template: Option<Template>,
    /// `tag-template`; `None`: [`TAG_TEMPLATE`].
    pub tag_template: Option<Template>,
    /// `external-domain-tls`. Default off.
    pub external_tls: bool,
    /// `cluster-local-domain-tls`. Default off.
    pub cluster_local_tls: bool,
    /// `system-internal-tls`. Default off.
    pub system_internal_tls: bool,
    /// `http-protocol`. Default served.
    pub http: HttpProtocol,
    /// `rollout-duration`, whole seconds; zero: at once. Default 0.
    pub rollout: Duration,
    /// `autocreate-cluster-domain-claims`. Default false.
    pub autocreate_claims: bool,
    /// `enable-mesh-pod-addressability`. Default false.
    pub mesh_pod_addressability: bool,
    /// `mesh-compatibility-mode`. Default auto.
    pub mesh: MeshMode,
    /// `default-external-scheme` of URLs without TLS. Default `http`.
    pub external_scheme: String,
    /// `rouse.dev.path`, Rouse's own: the way of services that say nothing; `None`: the path rule decides. (The
    /// annotation is `rouse.dev/path`; a ConfigMap's key may hold no slash.)
    pub path: Option<Path>,
    /// Rouse's own, what gateways make of requests: `rouse.dev.trusted-proxies`, networks divided by commas, default none;
    /// `rouse.dev.proxy-protocol`, default false; `rouse.dev.upgrades`, protocols besides WebSocket divided by commas,
    /// default none; `rouse.dev.underscores-in-headers`, default false.
    pub edge: Edge,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            ingress_class: "istio.ingress.networking.knative.dev".into(),
            certificate_class: "cert-manager.certificate.networking.knative.dev".into(),
            wildcard_selector: None,
            domain_template: None,
            tag_template: None,
            external_tls: false,
            cluster_local_tls: false,
            system_internal_tls: false,
            http: HttpProtocol::Enabled,
            rollout: Duration::ZERO,
            autocreate_claims: false,
            mesh_pod_addressability: false,
            mesh: MeshMode::Auto,
            external_scheme: "http".into(),
            path: None,
            edge: Edge::default(),
        }
    }
}

impl ConfigMap for Network {
    const NAME: &'static str = "config-network";

    fn read(keys: &mut Keys<'_>) -> Self {
        older(keys);
        let mut it = Self::default();
        keys.text("ingress-class", &mut it.ingress_class);
        keys.text("certificate-class", &mut it.certificate_class);
        keys.flag("autocreate-cluster-domain-claims", &mut it.autocreate_claims);
        keys.flag("enable-mesh-pod-addressability", &mut it.mesh_pod_addressability);
        keys.text("default-external-scheme", &mut it.external_scheme);
        it.rollout = rollout(keys);
        it.mesh = mesh(keys);
        it.wildcard_selector = selector(keys);
        it.domain_template = domain_template(keys);
        it.tag_template = tag_template(keys);
        it.external_tls = external_tls(keys);
        it.http = http(keys);
        it.system_internal_tls = system_internal_tls(keys);
        it.cluster_local_tls = encryption(keys, "cluster-local-domain-tls").unwrap_or(false);
        it.path = path(keys);
        it.edge = edge(keys);
        it
    }
}

fn older(keys: &mut Keys<'_>) {
    keys.renamed(&[
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
    keys.superseded(&[
        ("dataplane-trust", "system-internal-tls"),
        ("controlplane-trust", "system-internal-tls"),
    ]);
    let mesh = "there is no sidecar whose traffic could be left out";
    keys.without_effect(&[("istio.sidecar.includeOutboundIPRanges", mesh)]);
}

fn rollout(keys: &mut Keys<'_>) -> Duration {
    let mut seconds = 0;
    keys.int64("rollout-duration", &mut seconds);
    if seconds < 0 {
        keys.wrong(format!("rollout-duration must be a positive integer, but was {seconds}"));
    }
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// Anything else means `auto`, as in Knative, but is told.
fn mesh(keys: &mut Keys<'_>) -> MeshMode {
    let key = "mesh-compatibility-mode";
    match keys.get(key).map(str::to_ascii_lowercase).as_deref() {
        None | Some("auto") => MeshMode::Auto,
        Some("enabled") => MeshMode::Enabled,
        Some("disabled") => MeshMode::Disabled,
        Some(other) => {
            keys.warn(format!("{key} = {other:?} is no value of it; its default holds"));
            MeshMode::Auto
        }
    }
}

fn selector(keys: &mut Keys<'_>) -> Option<LabelSelector> {
    let key = "namespace-wildcard-cert-selector";
    let text = keys.get(key).filter(|text| !text.is_empty())?;
    match serde_norway::from_str(text) {
        Ok(selector) => selector,
        Err(why) => {
            keys.wrong(format!("failed to parse {key:?}: {why}"));
            None
        }
    }
}

fn domain_template(keys: &mut Keys<'_>) -> Option<Template> {
    let source = keys.get("domain-template").map(str::trim)?;
    let read = Template::parse("domain-template", source, &DOMAIN_FIELDS);
    let tried = read.and_then(|template| {
        let no = || BTreeMap::<&str, &str>::new();
        let values = domain_values("foo", "bar", "baz.com", no(), no());
        check_host(&template.render(&values)?).map(|()| template)
    });
    accept(keys, tried)
}

/// What a domain template is given.
pub fn domain_values<'a>(
    name: &str,
    namespace: &str,
    domain: &str,
    annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
    labels: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Values {
    let values = Values::default().text("Name", name).text("Namespace", namespace);
    values.text("Domain", domain).map("Annotations", annotations).map("Labels", labels)
}

fn tag_template(keys: &mut Keys<'_>) -> Option<Template> {
    let source = keys.get("tag-template").map(str::trim)?;
    let read = Template::parse("tag-template", source, &TAG_FIELDS);
    let tried =
        read.and_then(|template| template.render(&tag_values("foo", "v2")).map(|_name| template));
    accept(keys, tried)
}

/// What a tag template is given.
pub fn tag_values(name: &str, tag: &str) -> Values {
    Values::default().text("Name", name).text("Tag", tag)
}

fn accept(keys: &mut Keys<'_>, tried: Result<Template, String>) -> Option<Template> {
    tried.map_err(|why| keys.wrong(why)).ok()
}

/// Refuses what no URL could have as its host.
fn check_host(host: &str) -> Result<(), String> {
    let (name, path) = host.split_at(host.find('/').unwrap_or(host.len()));
    if name.is_empty() {
        return Err("empty hostname".into());
    }
    if !path.is_empty() && path != "/" {
        return Err(format!("domain template has url path: {path}"));
    }
    match name.chars().find(|it| !it.is_ascii_alphanumeric() && !"-._".contains(*it)) {
        Some(bad) => Err(format!("domain template gives {name:?}: {bad:?} in host name")),
        None => Ok(()),
    }
}

fn is_enabled(text: &str) -> bool {
    text.eq_ignore_ascii_case("enabled")
}

/// Anything but `enabled` is off, as in Knative.
fn external_tls(keys: &mut Keys<'_>) -> bool {
    let key = "external-domain-tls";
    let text = keys.get(key).unwrap_or_default();
    if !is_enabled(text) && !text.is_empty() && !text.eq_ignore_ascii_case("disabled") {
        keys.warn(format!("{key} = {text:?} is no value of it; its default holds"));
    }
    is_enabled(text)
}

fn http(keys: &mut Keys<'_>) -> HttpProtocol {
    let text = keys.get("http-protocol").unwrap_or_default();
    match text.to_ascii_lowercase().as_str() {
        "" | "enabled" => HttpProtocol::Enabled,
        "redirected" => HttpProtocol::Redirected,
        "disabled" => {
            keys.warn("http-protocol = \"Disabled\" is of an older release: use \"Redirected\"");
            HttpProtocol::Disabled
        }
        _ => {
            keys.wrong(format!("httpProtocol {text} in config-network ConfigMap is not supported"));
            HttpProtocol::Enabled
        }
    }
}

/// `None` where nothing is said.
fn encryption(keys: &mut Keys<'_>, key: &'static str) -> Option<bool> {
    let text = keys.get(key).unwrap_or_default();
    match text.to_ascii_lowercase().as_str() {
        "" => None,
        "disabled" => Some(false),
        "enabled" => Some(true),
        _ => {
            keys.wrong(format!(
                "{key} with value: {text:?} in config-network ConfigMap is not supported"
            ));
            None
        }
    }
}

/// The key of older releases counts until the newer one says `enabled`, as in Knative.
fn system_internal_tls(keys: &mut Keys<'_>) -> bool {
    let older = "internal-encryption";
    let before = keys.get(older).map(parse_bool);
    if let Some(read) = &before {
        keys.warn(format!("key {older:?} is of an older release: use \"system-internal-tls\""));
        if let Err(why) = read {
            keys.wrong(format!("failed to parse {older:?}: {why}"));
        }
    }
    encryption(keys, "system-internal-tls") == Some(true) || before == Some(Ok(true))
}

fn path(keys: &mut Keys<'_>) -> Option<Path> {
    let key = "rouse.dev.path";
    match keys.get(key) {
        None | Some("") => None,
        Some("direct") => Some(Path::Direct),
        Some("activator") => Some(Path::Activator),
        Some(other) => {
            keys.wrong(format!("{key} = {other:?}, must be \"direct\" or \"activator\""));
            None
        }
    }
}

fn edge(keys: &mut Keys<'_>) -> Edge {
    let mut it = Edge::default();
    let key = "rouse.dev.trusted-proxies";
    for text in listed(keys, key) {
        match network(text) {
            Some(net) => it.trusted_proxies.push(net),
            None => keys.wrong(format!("{key} has {text:?}, must be ADDRESS/LENGTH")),
        }
    }
    if it.trusted_proxies.iter().any(|net| net.prefix_len() == 0) {
        keys.warn(format!(
            "{key} trusts every client: each may write its own address and protocol"
        ));
    }
    let switch = "rouse.dev.proxy-protocol";
    keys.flag(switch, &mut it.proxy_protocol);
    if it.proxy_protocol && it.trusted_proxies.is_empty() {
        keys.wrong(format!("{switch} needs {key}: the header is read from no other peers"));
    }
    let key = "rouse.dev.upgrades";
    for text in listed(keys, key) {
        let name = text.to_ascii_lowercase();
        if is_upgrade(&name) {
            it.upgrades.push(name);
        } else {
            keys.wrong(format!(
                "{key} has {text:?}, must be protocols to switch to, and never HTTP"
            ));
        }
    }
    keys.flag("rouse.dev.underscores-in-headers", &mut it.underscores);
    it
}

/// What a key lists, divided by commas or spaces.
fn listed<'a>(keys: &mut Keys<'a>, key: &'static str) -> impl Iterator<Item = &'a str> + use<'a> {
    let all = keys.get(key).unwrap_or_default().split([',', ' ', '\n']);
    all.map(str::trim).filter(|it| !it.is_empty())
}

#[cfg(test)]
#[path = "network/tests.rs"]
mod tests;
