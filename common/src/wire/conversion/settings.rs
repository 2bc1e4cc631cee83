//! Pure: conversion of the settings that hold for all services.

use ipnet::IpNet;

use super::{
    super::{
        EdgeSettings, GlobalSettings, HstsPolicy, LogLevel, LogLevels, RequestLogSettings,
        TelemetrySettings, TlsCipher, TlsMinVersion, TlsSettings, is_allowed_upgrade_name,
        parse_network,
    },
    WireError, WireResult,
    certificates::parse_secret_name,
    parse_optional_ms, parse_optional_port, raw, to_ms,
};
use crate::request_log::LogTemplate;

impl TryFrom<raw::Settings> for GlobalSettings {
    type Error = WireError;
    fn try_from(message: raw::Settings) -> WireResult<Self> {
        let request_log = message.request_log.map(RequestLogSettings::try_from).transpose()?;
        let levels = message.log_levels.map(Into::into).unwrap_or_default();
        let edge = message.edge.map(EdgeSettings::try_from).transpose()?.unwrap_or_default();
        let telemetry = message.telemetry.map(TelemetrySettings::try_from).transpose()?;
        let telemetry = telemetry.unwrap_or_default();
        Ok(Self { request_log, log_levels: levels, edge, telemetry })
    }
}

impl From<GlobalSettings> for raw::Settings {
    fn from(value: GlobalSettings) -> Self {
        // Defaults are not sent: an absent field means the default.
        let levels = (value.log_levels != LogLevels::default()).then(|| value.log_levels.into());
        let edge = (value.edge != EdgeSettings::default()).then(|| value.edge.into());
        let has_telemetry = value.telemetry != TelemetrySettings::default();
        let telemetry = has_telemetry.then(|| value.telemetry.into());
        let request_log = value.request_log.map(Into::into);
        Self { request_log, log_levels: levels, edge, telemetry }
    }
}

impl TryFrom<raw::Edge> for EdgeSettings {
    type Error = WireError;
    fn try_from(message: raw::Edge) -> WireResult<Self> {
        // Checked here too, although the controller checks its ConfigMap: it may be of another release.
        if let Some(bad) = message.upgrades.iter().find(|name| !is_allowed_upgrade_name(name)) {
            return Err(WireError::new("edge.upgrades", bad, "must be a protocol to switch to"));
        }
        Ok(Self {
            trusted_proxies: parse_networks("edge.trusted_proxies", &message.trusted_proxies)?,
            requires_proxy_protocol: message.proxy_protocol,
            allowed_upgrades: message.upgrades,
            allows_underscores: message.underscores,
            certificates: message
                .certificates
                .iter()
                .map(|name| parse_secret_name("edge.certificates", name))
                .collect::<WireResult<_>>()?,
            https_port: parse_optional_port("edge.https_port", message.https_port)?,
            hsts: parse_hsts("edge.hsts", &message.hsts)?,
            tls: parse_tls(message.tls13_only, &message.tls_ciphers)?,
            is_sni_strict: message.strict_sni,
            tcp_idle_timeout: parse_optional_ms(message.tcp_idle_ms),
            trusted_ingresses: parse_networks(
                "edge.trusted_ingresses",
                &message.trusted_ingresses,
            )?,
        })
    }
}

impl From<EdgeSettings> for raw::Edge {
    fn from(value: EdgeSettings) -> Self {
        Self {
            trusted_proxies: value.trusted_proxies.iter().map(ToString::to_string).collect(),
            proxy_protocol: value.requires_proxy_protocol,
            upgrades: value.allowed_upgrades,
            underscores: value.allows_underscores,
            certificates: value.certificates.iter().map(ToString::to_string).collect(),
            https_port: value.https_port.map_or(0, |port| port.get().into()),
            hsts: value.hsts.map(|it| it.as_str().to_owned()).unwrap_or_default(),
            tls13_only: value.tls.min_version == TlsMinVersion::Tls13,
            tls_ciphers: value.tls.ciphers.iter().map(|it| it.name().to_owned()).collect(),
            strict_sni: value.is_sni_strict,
            tcp_idle_ms: value.tcp_idle_timeout.map_or(0, to_ms),
            trusted_ingresses: value.trusted_ingresses.iter().map(ToString::to_string).collect(),
        }
    }
}

/// Parses networks, each as `ADDRESS/LENGTH`.
fn parse_networks(field: &'static str, texts: &[String]) -> WireResult<Vec<IpNet>> {
    let parse = |text: &String| {
        let error = || WireError::new(field, text, "must be ADDRESS/LENGTH");
        parse_network(text).ok_or_else(error)
    };
    texts.iter().map(parse).collect()
}

/// Parses a `Strict-Transport-Security`. It may be absent, which is sent as an empty text.
pub(super) fn parse_hsts(field: &'static str, text: &str) -> WireResult<Option<HstsPolicy>> {
    if text.is_empty() {
        return Ok(None);
    }
    let parsed = HstsPolicy::parse(text);
    parsed.map(Some).map_err(|_fault| WireError::new(field, text, "must be a policy of RFC 6797"))
}

fn parse_tls(tls13_only: bool, ciphers: &[String]) -> WireResult<TlsSettings> {
    // A cipher that only a later release knows refuses the whole item: without it, fewer clients might be served.
    let cipher = |name: &String| {
        let error = || WireError::new("edge.tls_ciphers", name, "must be a supported cipher");
        TlsCipher::from_name(name).ok_or_else(error)
    };
    let ciphers = ciphers.iter().map(cipher).collect::<WireResult<Vec<_>>>()?;
    let min_version = if tls13_only { TlsMinVersion::Tls13 } else { TlsMinVersion::Tls12 };
    let settings = TlsSettings { min_version, ciphers };
    let count = settings.ciphers.len();
    let rule = "must have a cipher of the lowest version or a later one";
    settings.check().map_err(|_fault| WireError::new("edge.tls_ciphers", count, rule))?;
    Ok(settings)
}

impl TryFrom<raw::RequestLog> for RequestLogSettings {
    type Error = WireError;
    fn try_from(message: raw::RequestLog) -> WireResult<Self> {
        // A template that cannot be parsed refuses the whole item, so no setting of it applies without the others.
        let template = LogTemplate::parse(&message.template).map_err(|bad| {
            WireError::new("request_log.template", bad, "must be a template that can be parsed")
        })?;
        Ok(Self { template, logs_probes: message.probes })
    }
}

impl From<RequestLogSettings> for raw::RequestLog {
    fn from(value: RequestLogSettings) -> Self {
        Self { template: value.template.source().to_owned(), probes: value.logs_probes }
    }
}

impl From<raw::LogLevels> for LogLevels {
    fn from(message: raw::LogLevels) -> Self {
        Self {
            controller: parse_log_level(message.controller()),
            agent: parse_log_level(message.agent()),
            activator: parse_log_level(message.activator()),
            autoscaler: parse_log_level(message.autoscaler()),
        }
    }
}

impl From<LogLevels> for raw::LogLevels {
    fn from(levels: LogLevels) -> Self {
        let raw = |it| i32::from(raw_log_level(it));
        Self {
            controller: raw(levels.controller),
            agent: raw(levels.agent),
            activator: raw(levels.activator),
            autoscaler: raw(levels.autoscaler),
        }
    }
}

fn parse_log_level(message: raw::LogLevel) -> LogLevel {
    match message {
        raw::LogLevel::Debug => LogLevel::Debug,
        raw::LogLevel::Info => LogLevel::Info,
        raw::LogLevel::Warn => LogLevel::Warn,
        raw::LogLevel::Error => LogLevel::Error,
    }
}

fn raw_log_level(level: LogLevel) -> raw::LogLevel {
    match level {
        LogLevel::Debug => raw::LogLevel::Debug,
        LogLevel::Info => raw::LogLevel::Info,
        LogLevel::Warn => raw::LogLevel::Warn,
        LogLevel::Error => raw::LogLevel::Error,
    }
}
