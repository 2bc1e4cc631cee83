//! Pure: `config-network`: names of services, rollouts, and Rouse's own default path.
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
/// Why nothing comes of settings about certificates.
pub(super) const NO_TLS: &str = "services are served without TLS";
/// How Go writes false.
pub(super) const OFF: [&str; 3] = ["false", "f", "0"];
/// What a domain template may name.
const DOMAIN_FIELDS: [&str; 5] = ["Name", "Namespace", "Domain", "Annotations", "Labels"];
/// What a tag template may name.
const TAG_FIELDS: [&str; 2] = ["Name", "Tag"];

/// What plain HTTP gets from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpProtocol {
    /// It is served.
    Enabled,
    /// It is sent to HTTPS.
    Redirected,
}

/// `config-network`, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// `domain-template`; `None`: [`DOMAIN_TEMPLATE`].
    pub domain_template: Option<Template>,
    /// `tag-template`; `None`: [`TAG_TEMPLATE`].
    pub tag_template: Option<Template>,
    /// `http-protocol`. Default served.
    pub http: HttpProtocol,
    /// `rollout-duration`, whole seconds; zero: at once. Default 0.
    pub rollout: Duration,
    /// `autocreate-cluster-domain-claims`. Default false.
    pub autocreate_claims: bool,
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
            domain_template: None,
            tag_template: None,
            http: HttpProtocol::Enabled,
            rollout: Duration::ZERO,
            autocreate_claims: false,
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
        classes(keys);
        tls(keys);
        mesh(keys);
        let mut it = Self::default();
        keys.flag("autocreate-cluster-domain-claims", &mut it.autocreate_claims);
        keys.text("default-external-scheme", &mut it.external_scheme);
        it.rollout = rollout(keys);
        it.domain_template = domain_template(keys);
        it.tag_template = tag_template(keys);
        it.http = http(keys);
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

/// Which implementation serves names and makes certificates.
fn classes(keys: &mut Keys<'_>) {
    keys.idle("ingress-class", &[], "one gateway serves every class");
    keys.idle("certificate-class", &[], NO_TLS);
}

/// Pods are always asked at their own addresses; what else is asked for is told.
fn mesh(keys: &mut Keys<'_>) {
    const WHY: &str = "pods are always asked at their own addresses";
    let mut addressable = false;
    keys.flag("enable-mesh-pod-addressability", &mut addressable);
    keys.idle("enable-mesh-pod-addressability", &OFF, WHY);
    keys.idle("mesh-compatibility-mode", &["auto", "disabled"], WHY);
}

/// Everything about certificates of names: what Knative would refuse is refused.
fn tls(keys: &mut Keys<'_>) {
    wildcard(keys);
    // Anything but `enabled` is off there, too.
    keys.idle("external-domain-tls", &["disabled"], NO_TLS);
    encryption(keys, "cluster-local-domain-tls");
    encryption(keys, "system-internal-tls");
    internal_encryption(keys);
}

fn wildcard(keys: &mut Keys<'_>) {
    let key = "namespace-wildcard-cert-selector";
    let text = keys.get(key).unwrap_or_default();
    if let Err(why) = serde_norway::from_str::<Option<LabelSelector>>(text) {
        keys.wrong(format!("failed to parse {key:?}: {why}"));
    }
    keys.idle(key, &[], NO_TLS);
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

fn http(keys: &mut Keys<'_>) -> HttpProtocol {
    let text = keys.get("http-protocol").unwrap_or_default();
    match text.to_ascii_lowercase().as_str() {
        "" | "enabled" => HttpProtocol::Enabled,
        "redirected" => HttpProtocol::Redirected,
        "disabled" => {
            let instead = "plain HTTP is served: use \"Redirected\" to send it to HTTPS";
            keys.warn(format!("http-protocol = {text:?} has no effect: {instead}"));
            HttpProtocol::Enabled
        }
        _ => {
            keys.wrong(format!("httpProtocol {text} in config-network ConfigMap is not supported"));
            HttpProtocol::Enabled
        }
    }
}

fn encryption(keys: &mut Keys<'_>, key: &'static str) {
    let text = keys.get(key).unwrap_or_default();
    if !["", "disabled", "enabled"].contains(&text.to_ascii_lowercase().as_str()) {
        let why = format!("{key} with value: {text:?} in config-network ConfigMap");
        keys.wrong(format!("{why} is not supported"));
    }
    keys.idle(key, &["disabled"], NO_TLS);
}

/// The key of releases before `system-internal-tls`.
fn internal_encryption(keys: &mut Keys<'_>) {
    let key = "internal-encryption";
    if let Some(Err(why)) = keys.get(key).map(parse_bool) {
        keys.wrong(format!("failed to parse {key:?}: {why}"));
    }
    keys.superseded(&[(key, "system-internal-tls")]);
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
