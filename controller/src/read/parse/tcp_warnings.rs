//! Pure: warnings about settings that have no effect because of the protocol.
//!
//! Settings of HTTP have none on a Revision that speaks raw TCP, and a gateway port has none on one that does not.
//! Settings of the gateway's TLS have none on a host whose TLS is passed through.

use common::wire::AppProtocol;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use crate::model::{
    knative::{key, user_container::parse_protocol},
    problem::Problem,
};

/// Warns of settings of HTTP on a Service or Configuration whose template names the protocol `tcp`. Warns of a gateway
/// port on one whose template does not. `meta` is the metadata of the object, `template` that of its template, and
/// `spec` the spec of its template.
pub(super) fn warn_http_settings(
    meta: &ObjectMeta,
    template: &ObjectMeta,
    spec: &Value,
    warnings: &mut Vec<Problem>,
) {
    let value = template.annotations.as_ref().and_then(|all| all.get(key::PROTOCOL));
    let is_tcp = value.and_then(|it| parse_protocol(it)) == Some(AppProtocol::Tcp);
    let mut warn = |at: String, field: &str, reason: &str| {
        warnings.push(Problem::new(at, format!("{field} has no effect: {reason}")));
    };
    let annotations = meta.annotations.iter().flat_map(|all| all.keys());
    // A protocol that is not known is refused elsewhere, and counts as HTTP here.
    if !is_tcp {
        for name in annotations.filter(|it| *it == key::GATEWAY_PORT) {
            warn(format!("metadata.annotations.{name}"), name, "only raw TCP has a gateway port");
        }
        return;
    }
    for name in annotations.filter(|it| key::HTTP_PROTOCOL.contains(&it.as_str())) {
        warn(format!("metadata.annotations.{name}"), name, "raw TCP has no host outside");
    }
    if spec["idleTimeoutSeconds"].as_i64().is_some_and(|it| it > 0) {
        let field = "idleTimeoutSeconds";
        let at = format!("spec.template.spec.{field}");
        warn(at, field, "connections of raw TCP may be idle without limit");
    }
}

/// Warns of settings of TLS and HTTP on a DomainMapping whose TLS the gateway passes through. `meta` is its metadata.
pub(super) fn warn_passthrough_settings(
    meta: &ObjectMeta,
    mapping: &Value,
    warnings: &mut Vec<Problem>,
) {
    let Some(annotations) = &meta.annotations else { return };
    if annotations.get(key::TLS).is_none_or(|it| it != key::TLS_PASSTHROUGH) {
        return;
    }
    let mut warn = |at: String, field: &str, reason: &str| {
        warnings.push(Problem::new(at, format!("{field} has no effect: {reason}")));
    };
    for name in annotations.keys() {
        if name == key::HSTS || key::HTTP_PROTOCOL.contains(&name.as_str()) {
            let reason = "TLS is passed through, and the gateway speaks no HTTP at the host";
            warn(format!("metadata.annotations.{name}"), name, reason);
        }
    }
    if !mapping["spec"]["tls"].is_null() {
        let reason = "TLS is passed through, and the server presents its certificate";
        warn("spec.tls".to_owned(), "spec.tls", reason);
    }
}
