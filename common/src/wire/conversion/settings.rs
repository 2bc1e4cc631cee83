//! Pure: conversion of the settings that hold for all services.

use super::{
    super::{
        EdgeSettings, GlobalSettings, LogLevel, LogLevels, RequestLogSettings,
        is_allowed_upgrade_name, parse_network,
    },
    WireError, WireResult, raw,
};
use crate::request_log::LogTemplate;

impl TryFrom<raw::Settings> for GlobalSettings {
    type Error = WireError;
    fn try_from(it: raw::Settings) -> WireResult<Self> {
        let request_log = it.request_log.map(RequestLogSettings::try_from).transpose()?;
        let levels = it.log_levels.map(Into::into).unwrap_or_default();
        let edge = it.edge.map(EdgeSettings::try_from).transpose()?.unwrap_or_default();
        Ok(Self { request_log, log_levels: levels, edge })
    }
}

impl From<GlobalSettings> for raw::Settings {
    fn from(it: GlobalSettings) -> Self {
        // Defaults are not sent: an absent field means the default.
        let levels = (it.log_levels != LogLevels::default()).then(|| it.log_levels.into());
        let edge = (it.edge != EdgeSettings::default()).then(|| it.edge.into());
        Self { request_log: it.request_log.map(Into::into), log_levels: levels, edge }
    }
}

impl TryFrom<raw::Edge> for EdgeSettings {
    type Error = WireError;
    fn try_from(it: raw::Edge) -> WireResult<Self> {
        let trusted = |text: String| {
            let refused =
                || WireError::new("edge.trusted_proxies", &text, "must be ADDRESS/LENGTH");
            parse_network(&text).ok_or_else(refused)
        };
        // Checked here too, although the controller checks its ConfigMap: it may be of another release.
        if let Some(bad) = it.upgrades.iter().find(|name| !is_allowed_upgrade_name(name)) {
            return Err(WireError::new("edge.upgrades", bad, "must be a protocol to switch to"));
        }
        Ok(Self {
            trusted_proxies: it
                .trusted_proxies
                .into_iter()
                .map(trusted)
                .collect::<WireResult<_>>()?,
            requires_proxy_protocol: it.proxy_protocol,
            allowed_upgrades: it.upgrades,
            allows_underscores: it.underscores,
        })
    }
}

impl From<EdgeSettings> for raw::Edge {
    fn from(it: EdgeSettings) -> Self {
        Self {
            trusted_proxies: it.trusted_proxies.iter().map(ToString::to_string).collect(),
            proxy_protocol: it.requires_proxy_protocol,
            upgrades: it.allowed_upgrades,
            underscores: it.allows_underscores,
        }
    }
}

impl TryFrom<raw::RequestLog> for RequestLogSettings {
    type Error = WireError;
    fn try_from(it: raw::RequestLog) -> WireResult<Self> {
        // A template that cannot be parsed refuses the whole item, so no setting of it applies without the others.
        let template = LogTemplate::parse(&it.template).map_err(|bad| {
            WireError::new("request_log.template", bad, "must be one that can be carried out")
        })?;
        Ok(Self { template, logs_probes: it.probes })
    }
}

impl From<RequestLogSettings> for raw::RequestLog {
    fn from(it: RequestLogSettings) -> Self {
        Self { template: it.template.source().to_owned(), probes: it.logs_probes }
    }
}

impl From<raw::LogLevels> for LogLevels {
    fn from(it: raw::LogLevels) -> Self {
        Self {
            controller: parse_log_level(it.controller()),
            agent: parse_log_level(it.agent()),
            activator: parse_log_level(it.activator()),
            autoscaler: parse_log_level(it.autoscaler()),
        }
    }
}

impl From<LogLevels> for raw::LogLevels {
    fn from(it: LogLevels) -> Self {
        let raw = |it| i32::from(raw_log_level(it));
        Self {
            controller: raw(it.controller),
            agent: raw(it.agent),
            activator: raw(it.activator),
            autoscaler: raw(it.autoscaler),
        }
    }
}

fn parse_log_level(it: raw::LogLevel) -> LogLevel {
    match it {
        raw::LogLevel::Debug => LogLevel::Debug,
        raw::LogLevel::Info => LogLevel::Info,
        raw::LogLevel::Warn => LogLevel::Warn,
        raw::LogLevel::Error => LogLevel::Error,
    }
}

fn raw_log_level(it: LogLevel) -> raw::LogLevel {
    match it {
        LogLevel::Debug => raw::LogLevel::Debug,
        LogLevel::Info => raw::LogLevel::Info,
        LogLevel::Warn => raw::LogLevel::Warn,
        LogLevel::Error => raw::LogLevel::Error,
    }
}
