//! Pure: Routes whose public hosts another ingress fronts → the class in force, the spec of the Ingress, and the status
//! that follows from it (knative/serving `pkg/reconciler/route` at 98e5ef9).
//!
//! A change of the class loses no request of a host that was served. The gateway keeps the host until the other ingress
//! is ready, and has it again before the Ingress is deleted.

use std::collections::BTreeMap;

use common::wire::{AppProtocol, NamespacedName};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::json;

use super::{
    conditions::ingress_not_configured,
    host_certificates, local_tls,
    requested_certificates::{self, CHALLENGE_PATH, route_tags},
    routes::{is_http_redirected, name_shares, public_host, serves_tcp},
};
use crate::model::{
    cluster_state::{
        AppState, ClusterState, ConditionStatus, ConditionType, IngressState, ParsedTemplate,
        PlatformKind, SolvedChallenge,
    },
    config_maps::{Flag, network::OWN_INGRESS_CLASS},
    knative::{
        key,
        networking::{
            IngressHeaderMatch, IngressHostRule, IngressHttpRule, IngressPath, IngressSplit,
            IngressTls, IngressVisibility, KnativeIngressSpec, revision_service_port,
        },
    },
    object::{hash::stable_json_hash, names::tagged_name},
};

/// Headers by which activators find the Revision of a request (knative/serving `pkg/activator/activator.go`).
const REVISION_HEADER: &str = "Knative-Serving-Revision";
const NAMESPACE_HEADER: &str = "Knative-Serving-Namespace";
/// Headers about tags (knative/networking `pkg/http/header/header.go`).
const TAG_HEADER: &str = "Knative-Serving-Tag";
const DEFAULT_ROUTE_HEADER: &str = "Knative-Serving-Default-Route";

/// Returns the class of another ingress that is to front the public hosts of a Route; `None`: Rouse's gateway is to
/// serve them.
pub fn wanted_class<'a>(app: &'a AppState, cluster: &'a ClusterState) -> Option<&'a str> {
    let network = &cluster.settings.config_maps.network;
    // A local node has no other ingress. Requests of one that is not trusted would get 404.
    let is_local = cluster.settings.platform == PlatformKind::Local;
    if app.route.is_none() || is_local || !network.trusts_ingresses() {
        return None;
    }
    let own = key::INGRESS_CLASS.iter().find_map(|key| app.route_annotation(key));
    let class = own.filter(|it| !it.is_empty()).unwrap_or(&network.ingress_class);
    (class != OWN_INGRESS_CLASS).then_some(class)
}

/// Returns true if another ingress may send requests to the Revisions of an app, by their own Services. Until its
/// Ingress is deleted, it may do so after a change of the class, too.
pub fn is_fronted(app: &AppState, name: &NamespacedName, cluster: &ClusterState) -> bool {
    let has_ingress = |route: &NamespacedName, app: &AppState| {
        wanted_class(app, cluster).is_some() || cluster.ingresses.by_name.contains_key(route)
    };
    let referring = cluster.names.referring_apps.get(name).into_iter().flatten();
    let mut others = referring.filter_map(|route| Some((route, &**cluster.apps.get(route)?)));
    has_ingress(name, app) || others.any(|(route, app)| has_ingress(route, app))
}

/// Returns true if Rouse's gateway serves the public hosts of a Route.
pub(super) fn is_served_by_gateway(app: &AppState) -> bool {
    app.route.as_ref().is_none_or(|it| it.ingress_class.is_none())
}

/// Sets the class in force of a Route. While the gateway serves the Route, it goes on until the other ingress is ready.
/// A Route without traffic has no request that could be lost, so that the wanted class is in force at once.
pub(super) fn update_ingress_class(
    app: &mut AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) {
    let wanted: Option<Box<str>> = wanted_class(app, cluster).map(Into::into);
    let spec = wanted.as_ref().and_then(|_| ingress_spec(app, name, cluster));
    let readiness = wanted
        .as_deref()
        .zip(spec)
        .and_then(|(class, spec)| present_readiness(app, name, class, &spec, cluster));
    let is_ready = matches!(readiness, Some(ConditionStatus::True(_)));
    let is_served = !app.traffic().is_empty();
    let Some(route) = &mut app.route else { return };
    // Back to the gateway there is no wait: it serves the hosts from the next RouteTable on, before the Ingress goes.
    let waits = route.ingress_class.is_none() && is_served && !is_ready;
    route.ingress_class = wanted.filter(|_| !waits);
}

/// Returns the status of a Route's `IngressReady` while another ingress fronts it and is not ready; `None`: the Route
/// waits for no other ingress.
pub(super) fn unready_ingress(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Option<ConditionStatus> {
    let class = app.route.as_ref()?.ingress_class.as_deref()?;
    // Without a name of HTTP there is no Ingress that the Route could wait for.
    let spec = ingress_spec(app, name, cluster)?;
    if !cluster.ingresses.is_listed {
        // A controller that has just started: what an earlier one has found stays.
        return match app.conditions.get(ConditionType::RouteIngress) {
            ConditionStatus::True(_) => None,
            ConditionStatus::Unknown(None) => Some(ingress_not_configured()),
            previous @ (ConditionStatus::Unknown(Some(_)) | ConditionStatus::False(_)) => {
                Some(previous)
            }
        };
    }
    let readiness = present_readiness(app, name, class, &spec, cluster).cloned();
    match readiness.unwrap_or_else(ingress_not_configured) {
        ConditionStatus::True(_) => None,
        status @ (ConditionStatus::Unknown(_) | ConditionStatus::False(_)) => Some(status),
    }
}

/// Returns what a controller has found about this spec of a Route's Ingress. The observed Ingress may still have an
/// earlier one.
fn present_readiness<'a>(
    app: &AppState,
    name: &NamespacedName,
    class: &str,
    spec: &KnativeIngressSpec,
    cluster: &'a ClusterState,
) -> Option<&'a ConditionStatus> {
    let ingress = own_ingress(app, name, class, cluster)?;
    let is_present = || ingress.spec_hash == Some(spec_hash(spec));
    ingress.readiness.as_ref().filter(|_| is_present())
}

/// Returns the hash of the spec of an Ingress.
pub fn spec_hash(spec: &KnativeIngressSpec) -> u64 {
    stable_json_hash(&json!(spec))
}

/// Returns the Ingress of a Route, if it has this class. One of an earlier Route, or in deletion, is none.
fn own_ingress<'a>(
    app: &AppState,
    name: &NamespacedName,
    class: &str,
    cluster: &'a ClusterState,
) -> Option<&'a IngressState> {
    let uid = app.route.as_ref()?.meta.uid;
    let ingress = cluster.ingresses.by_name.get(name)?;
    // An Ingress in deletion may still be served, but its successor has to be configured first.
    let is_own =
        ingress.owner_uid == Some(uid) && *ingress.class == *class && !ingress.is_terminating;
    is_own.then_some(ingress)
}

/// Returns the spec of the Ingress of a Route, as Knative makes it (`resources/ingress.go`); `None`: no name of the
/// Route has traffic of HTTP.
pub fn ingress_spec(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Option<KnativeIngressSpec> {
    let tags = route_tags(app).into_iter();
    let rules: Vec<IngressHostRule> =
        tags.flat_map(|tag| host_rules(tag, app, name, cluster)).collect();
    if rules.is_empty() {
        return None;
    }
    let public = rules.iter().filter(|it| it.visibility == IngressVisibility::ExternalIP);
    let certificate = |host: &String| {
        let secret = host_certificates::secret_of_route(app, name, host, cluster)?;
        Some(IngressTls {
            hosts: vec![host.clone()],
            secret_name: secret.name.to_string(),
            secret_namespace: secret.namespace.to_string(),
        })
    };
    // The other ingress reads the Secrets itself, so that only their names are passed on.
    let tls = public.flat_map(|it| &it.hosts).filter_map(certificate).collect();
    let http_protocol = key::HTTP_PROTOCOL.iter().find_map(|key| app.route_annotation(key));
    let is_redirected = is_http_redirected(http_protocol, cluster);
    let http_option = if is_redirected { "Redirected" } else { "Enabled" };
    Some(KnativeIngressSpec { http_option: http_option.into(), rules, tls })
}

/// Returns the rules of a Route's own name, or of a tag's. One is for hosts inside the cluster, and one for the public
/// host. A name that serves raw TCP has none, since no host leads to it.
fn host_rules(
    tag: Option<&str>,
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Vec<IngressHostRule> {
    let paths = name_paths(tag, app, name, cluster);
    if paths.is_empty() || serves_tcp(app, name, tag, cluster) {
        return Vec::new();
    }
    let rule = |hosts: Vec<String>, visibility, paths| IngressHostRule {
        hosts,
        visibility,
        http: IngressHttpRule { paths },
    };
    let service = NamespacedName::new(name.namespace.clone(), tagged_name(tag, &name.name));
    let mut local_hosts = local_tls::local_hosts(&service, &cluster.settings.cluster_domain);
    // Knative lists the shortest name first.
    local_hosts.reverse();
    let local = rule(local_hosts.into(), IngressVisibility::ClusterLocal, paths.clone());
    let public = public_host(tag, app, name, cluster).map(|host| {
        let challenges = challenge_paths(&host, &name.namespace, cluster);
        rule(vec![host], IngressVisibility::ExternalIP, [challenges, paths].concat())
    });
    [local].into_iter().chain(public).collect()
}

/// Returns the paths of a name. With tag header routing, the Route's own name leads to each tag by the header.
fn name_paths(
    tag: Option<&str>,
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Vec<IngressPath> {
    let features = &cluster.settings.config_maps.features;
    let mut path = revision_path(tag, app, name, cluster);
    if path.splits.is_empty() {
        return Vec::new();
    }
    // Without the feature the pods get no headers about tags, as in Knative.
    if features.tag_header_based_routing != Flag::Enabled {
        return vec![path];
    }
    if let Some(tag) = tag {
        path.append_headers.insert(TAG_HEADER.into(), tag.into());
        return vec![path];
    }
    path.append_headers.insert(DEFAULT_ROUTE_HEADER.into(), "true".into());
    let by_header = |tag: &str| IngressPath {
        headers: BTreeMap::from([(TAG_HEADER.into(), IngressHeaderMatch { exact: tag.into() })]),
        ..revision_path(Some(tag), app, name, cluster)
    };
    let tags = route_tags(app).into_iter().flatten();
    let tags = tags.filter(|tag| !serves_tcp(app, name, Some(*tag), cluster));
    // In Knative's order. The last path has no header to match, and takes all other requests.
    tags.map(by_header).chain([path]).collect()
}

/// Returns the path to the Revisions that share the requests of a name.
fn revision_path(
    tag: Option<&str>,
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> IngressPath {
    let split = |(revision, percent): (&str, u8)| {
        let found = app.revision(revision).or_else(|| cluster.revision(&name.namespace, revision));
        // A Revision that is not observed yet counts as one with the usual protocol.
        let protocol = found
            .map_or(AppProtocol::Http1, |it| ParsedTemplate::of_revision(it, cluster).protocol);
        IngressSplit {
            service_name: revision.into(),
            service_namespace: name.namespace.to_string(),
            service_port: IntOrString::Int(revision_service_port(protocol)),
            percent: percent.into(),
            append_headers: BTreeMap::from([
                (REVISION_HEADER.into(), revision.into()),
                (NAMESPACE_HEADER.into(), name.namespace.to_string()),
            ]),
        }
    };
    let splits = name_shares(app, tag).into_iter().map(split).collect();
    IngressPath { splits, ..IngressPath::default() }
}

/// Returns the paths at which authorities ask a host for tokens, each with the Service that responds.
fn challenge_paths(host: &str, namespace: &str, cluster: &ClusterState) -> Vec<IngressPath> {
    if !requested_certificates::is_enabled(cluster) {
        return Vec::new();
    }
    let path = |it: SolvedChallenge<'_>| {
        let split = IngressSplit {
            service_name: it.service.name.to_string(),
            service_namespace: it.service.namespace.to_string(),
            service_port: IntOrString::Int(it.solver.port.into()),
            percent: 100,
            append_headers: BTreeMap::new(),
        };
        let path = format!("{CHALLENGE_PATH}/{}", it.challenge.token);
        IngressPath { path, splits: vec![split], ..IngressPath::default() }
    };
    cluster.requests.solved_challenges(namespace, &[host]).into_iter().map(path).collect()
}
