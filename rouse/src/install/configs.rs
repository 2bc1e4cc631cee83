//! Pure: the `config-*` ConfigMaps, which belong to the operator once they exist.
//!
//! Each is shipped without a setting, with an `_example` that shows the possible settings, as in Knative. An edit of
//! the example is refused, because it would have no effect.

use controller::model::config_maps::example::{CHECKSUM_ANNOTATION, checksum};
use serde_json::{Value, json};

use super::{
    objects::{merge_fields, namespaced_object},
    settings::{InstallProfile, InstallSettings},
};

/// Suffix of each ConfigMap's name after `config-`, and its `_example`.
const EXAMPLES: [(&str, &str); 12] = [
    ("autoscaler", AUTOSCALER),
    ("certmanager", CERTMANAGER),
    ("defaults", DEFAULTS),
    ("deployment", DEPLOYMENT),
    ("domain", DOMAIN),
    ("features", "# Which fields of a pod users may set; values: enabled, disabled, allowed.\n"),
    ("gc", GC),
    ("leader-election", LEADER_ELECTION),
    ("logging", LOGGING),
    ("network", NETWORK),
    ("observability", OBSERVABILITY),
    ("tracing", "# Sets nothing any more: see config-observability.\n"),
];

const AUTOSCALER: &str = r#"# Requests in flight that one pod is meant to have, and the share of it to aim at, in percent.
container-concurrency-target-default: "100"
container-concurrency-target-percentage: "70"
# Requests that may come at once without the activator in their path. Rouse's own default: Knative's is 211.
target-burst-capacity: "0"
# Over how long load is averaged; when that is short because load has jumped; from which ratio on it has.
stable-window: "60s"
panic-window-percentage: "10.0"
panic-threshold-percentage: "200.0"
# By which factor a revision may grow or shrink in one step.
max-scale-up-rate: "1000.0"
max-scale-down-rate: "2.0"
# Whether revisions may have no pod at all, and how long the last one then stays.
enable-scale-to-zero: "true"
scale-to-zero-pod-retention-period: "0s"
# Pods at the start, at least and at most; 0 of the last two sets no bound. Starting with none is allowed, unlike in
# Knative.
initial-scale: "1"
allow-zero-initial-scale: "true"
min-scale: "0"
max-scale: "0"
max-scale-limit: "0"
scale-down-delay: "0s"
# Pods that stay frozen while a revision has no load, 0 to 10, and whether their memory stays: keep or reclaim. The key
# standby-ttl, as 24h, ends them after that time. Rouse's own, as all that follows.
standby: "0"
standby-memory: "keep"
# After how long without its agent a pod on standby takes no requests, and whether frozen pods give back the resources
# that they request.
standby-agent-timeout: "250ms"
standby-resize: "true"
"#;
const DEFAULTS: &str = r#"# Seconds that a request may take where its service says nothing, and at most.
revision-timeout-seconds: "300"
max-revision-timeout-seconds: "600"
# Requests that a pod gets at once; 0 sets no bound.
container-concurrency: "0"
container-concurrency-max-limit: "1000"
# Whether pods see Services as variables: true, false or default (Kubernetes' own).
enable-service-links: "false"
# Whether pods whose service names no account get its token: "false" makes each start 0.3 s shorter.
automount-service-account-token: "true"
"#;
const CERTMANAGER: &str = r#"# Issuer of cert-manager for the certificates of public hosts, with external-domain-tls in config-network:
# issuerRef: |
#   kind: ClusterIssuer
#   name: letsencrypt
"#;
const DEPLOYMENT: &str = r#"# Registries whose tags are not resolved to digests.
registries-skipping-tag-resolving: "kind.local,ko.local,dev.local"
# How long a start may take.
progress-deadline: "600s"
# Whether pods that ask for no resources and no place are bound to a node that has their image as they are made,
# without the scheduler. Rouse's own.
bind-pods: "false"
# Whether the first pod of a sleeping service prefers the zone that asks for it, in a cluster with several zones.
# Rouse's own.
wake-zone-preference: "true"
"#;
const DOMAIN: &str = r#"# Names of services from outside: NAME.NAMESPACE.DOMAIN. One domain for all, or more of them, each for the
# services that have its labels.
example.com: ""
example.org: |
  selector:
    app: prod
"#;
const GC: &str = r#"# How long and how many Revisions stay that nothing leads to.
retain-since-create-time: "48h"
retain-since-last-active-time: "15h"
min-non-active-revisions: "20"
max-non-active-revisions: "1000"
"#;
const LEADER_ELECTION: &str = r#"# Read as a controller starts. After so long without a word another one writes; the one that writes stops when it could
# not renew for so long; how often that is tried. Each must be longer than the next. Rouse's own defaults.
lease-duration: "5s"
renew-deadline: "3s"
retry-period: "1s"
"#;
const LOGGING: &str = r#"# How much each part logs: debug, info, warn or error. Followed while they run, unless RUST_LOG is set for them.
loglevel.controller: "info"
loglevel.agent: "info"
loglevel.activator: "info"
loglevel.autoscaler: "info"
"#;
const NETWORK: &str = r#"# How names from outside are made.
domain-template: "{{.Name}}.{{.Namespace}}.{{.Domain}}"
tag-template: "{{.Tag}}-{{.Name}}"
# Seconds over which a new revision takes over; 0: at once.
rollout-duration: "0"
# Class of the ingress that fronts services, where a service names none: that of Rouse's gateway, or that of another
# controller, such as kourier.ingress.networking.knative.dev. See rouse.dev.trusted-ingresses.
ingress-class: "rouse.ingress.networking.knative.dev"
# Whether certificates are requested for hosts of services and for domains, and by which implementation. See
# config-certmanager.
external-domain-tls: "Disabled"
certificate-class: "cert-manager.certificate.networking.knative.dev"
# Labels of the namespaces with one certificate for all their hosts: {} for all of them. Issuers need DNS-01 for it.
namespace-wildcard-cert-selector: ""
# Networks of the proxies and load balancers before the gateway, divided by commas: what these say in X-Forwarded-* and
# Forwarded counts, and no other sender's does. Rouse's own, as all that follows.
rouse.dev.trusted-proxies: ""
# Whether each connection from these begins with a header of the PROXY protocol, version 1 or 2.
rouse.dev.proxy-protocol: "false"
# Protocols besides WebSocket that a request may switch to, divided by commas.
rouse.dev.upgrades: ""
# Whether header names with an underscore are passed on from outside: many servers take X_Real_IP for X-Real-IP.
rouse.dev.underscores-in-headers: "false"
# Secrets of this namespace (tls.crt, tls.key) with certificates of the gateway, divided by commas. Each is for the hosts
# that it names; the first one also for all other hosts, and for clients that name none.
rouse.dev.certificates: ""
# Port of HTTPS for clients from outside, for redirects. Empty: 443.
rouse.dev.https-port: ""
# Strict-Transport-Security of responses over TLS, where neither the pod nor the domain has one of its own: max-age=31536000.
rouse.dev.hsts: ""
# Lowest version of TLS for clients, 1.2 or 1.3.
rouse.dev.tls-min-version: "1.2"
# Ciphers for clients of TLS, by their IANA names and divided by commas, those of TLS 1.3 among them. Empty: all.
rouse.dev.tls-ciphers: ""
# Whether clients of TLS are refused that name no host, or one without a certificate. Otherwise these get the first one of
# rouse.dev.certificates.
rouse.dev.tls-strict-sni: "false"
# Gateway ports that services of raw TCP may have (rouse.dev/port), as ports and ranges divided by commas: 5432,6000-6100.
rouse.dev.gateway-ports: ""
# Time without a byte after which a connection to such a port is reset: 1h. 0: never.
rouse.dev.tcp-idle-timeout: "0"
# Networks of the pods of other ingresses, divided by commas. What these say in Knative-Serving-Revision and
# Knative-Serving-Namespace chooses a revision. Without one, the gateway serves every class.
rouse.dev.trusted-ingresses: ""
"#;

const OBSERVABILITY: &str = r#"# Whether activators write a line of each request to standard output. Every service then goes through them.
logging.enable-request-log: "false"
# The line, in Go's template syntax without conditions: .Request, .Response, .Revision, .TraceID; js, html, urlquery.
logging.request-log-template: '{"httpRequest": {"requestMethod": "{{.Request.Method}}", "requestUrl": "{{js .Request.RequestURI}}", "requestSize": "{{.Request.ContentLength}}", "status": {{.Response.Code}}, "responseSize": "{{.Response.Size}}", "userAgent": "{{js .Request.UserAgent}}", "remoteIp": "{{js .Request.RemoteAddr}}", "serverIp": "{{.Revision.PodIP}}", "referer": "{{js .Request.Referer}}", "latency": "{{.Response.Latency}}s", "protocol": "{{.Request.Proto}}"}, "traceId": "{{.TraceID}}"}'
# Whether probes leave a line too.
logging.enable-probe-request-log: "false"
# Export of traces by activators to a collector of OpenTelemetry: grpc, http/protobuf or none.
tracing-protocol: "none"
# URL of this collector, such as http://collector.observability:4317. Only http is supported.
tracing-endpoint: ""
# Share of the traces that are sampled, from 0 to 1.
tracing-sampling-rate: "0"
# Metrics of requests by host and Revision: prometheus (only at /metrics), grpc, http/protobuf or none.
metrics-protocol: "none"
# URL of the collector of metrics.
metrics-endpoint: ""
"#;

/// All `config-*` ConfigMaps of an installation.
pub(crate) fn all(settings: &InstallSettings) -> Vec<Value> {
    EXAMPLES.iter().map(|(name, example)| config_map(name, example, settings)).collect()
}

/// Returns true if an object is a ConfigMap that belongs to the operator once it exists.
pub(crate) fn is_operator_owned(object: &Value) -> bool {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    object["kind"] == "ConfigMap" && name.starts_with("config-")
}

fn set_network_data(data: &mut Value, settings: &InstallSettings) {
    let proxies: Vec<String> = settings.trusted_proxies.iter().map(ToString::to_string).collect();
    if !proxies.is_empty() {
        data["rouse.dev.trusted-proxies"] = proxies.join(",").into();
        if settings.proxy_protocol {
            data["rouse.dev.proxy-protocol"] = "true".into();
        }
    }
    let ports: Vec<String> = settings.gateway_ports.iter().map(ToString::to_string).collect();
    if !ports.is_empty() {
        data["rouse.dev.gateway-ports"] = ports.join(",").into();
    }
}

fn config_map(name: &str, example: &str, settings: &InstallSettings) -> Value {
    let mut map = namespaced_object("v1", "ConfigMap", &format!("config-{name}"), "", settings);
    map["metadata"]["annotations"] = json!({CHECKSUM_ANNOTATION: checksum(example)});
    let mut data = json!({"_example": example});
    match name {
        // Only what the command line chooses becomes data; the operator sets the rest.
        "domain" => data[&settings.domain] = "".into(),
        "defaults" if settings.profile == InstallProfile::Fast => {
            data["automount-service-account-token"] = "false".into();
        }
        "network" => set_network_data(&mut data, settings),
        "deployment" if settings.profile == InstallProfile::Fast => {
            data["bind-pods"] = "true".into()
        }
        _ => {}
    }
    merge_fields(map, json!({"data": data}))
}
