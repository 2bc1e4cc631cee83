//! Pure: conversion of the settings that hold for all services.

use super::{
    super::{Edge, Level, Levels, RequestLog, Settings, is_upgrade, network},
    Checked, Refused, raw,
};
use crate::request_log::Template;

impl TryFrom<raw::Settings> for Settings {
    type Error = Refused;
    fn try_from(it: raw::Settings) -> Checked<Self> {
        let request_log = it.request_log.map(RequestLog::try_from).transpose()?;
        let levels = it.log_levels.map(Into::into).unwrap_or_default();
        let edge = it.edge.map(Edge::try_from).transpose()?.unwrap_or_default();
        Ok(Self { request_log, levels, edge })
    }
}

impl From<Settings> for raw::Settings {
    fn from(it: Settings) -> Self {
        // Defaults are not sent: an absent field means the default.
        let levels = (it.levels != Levels::default()).then(|| it.levels.into());
        let edge = (it.edge != Edge::default()).then(|| it.edge.into());
        Self { request_log: it.request_log.map(Into::into), log_levels: levels, edge }
    }
}

impl TryFrom<raw::Edge> for Edge {
    type Error = Refused;
    fn try_from(it: raw::Edge) -> Checked<Self> {
        let trusted = |text: String| {
            let refused = || Refused::new("edge.trusted_proxies", &text, "must be ADDRESS/LENGTH");
            network(&text).ok_or_else(refused)
        };
        // Checked here too, although the controller checks its ConfigMap: it may be of another release.
        if let Some(bad) = it.upgrades.iter().find(|name| !is_upgrade(name)) {
            return Err(Refused::new("edge.upgrades", bad, "must be a protocol to switch to"));
        }
        Ok(Self {
            trusted_proxies: it.trusted_proxies.into_iter().map(trusted).collect::<Checked<_>>()?,
            proxy_protocol: it.proxy_protocol,
            upgrades: it.upgrades,
            underscores: it.underscores,
        })
    }
}

impl From<Edge> for raw::Edge {
    fn from(it: Edge) -> Self {
        Self {
            trusted_proxies: it.trusted_proxies.iter().map(ToString::to_string).collect(),
            proxy_protocol: it.proxy_protocol,
            upgrades: it.upgrades,
            underscores: it.underscores,
        }
    }
}

impl TryFrom<raw::RequestLog> for RequestLog {
    type Error = Refused;
    fn try_from(it: raw::RequestLog) -> Checked<Self> {
        // A template that cannot be parsed refuses the whole item, so no setting of it applies without the others.
        let template = Template::parse(&it.template).map_err(|bad| {
            Refused::new("request_log.template", bad, "must be one that can be carried out")
        })?;
        Ok(Self { template, probes: it.probes })
    }
}

impl From<RequestLog> for raw::RequestLog {
    fn from(it: RequestLog) -> Self {
        Self { template: it.template.source().to_owned(), probes: it.probes }
    }
}

impl From<raw::LogLevels> for Levels {
    fn from(it: raw::LogLevels) -> Self {
        Self {
            controller: level(it.controller()),
            agent: level(it.agent()),
            activator: level(it.activator()),
            autoscaler: level(it.autoscaler()),
        }
    }
}

impl From<Levels> for raw::LogLevels {
    fn from(it: Levels) -> Self {
        let raw = |it| i32::from(raw_level(it));
        Self {
            controller: raw(it.controller),
            agent: raw(it.agent),
            activator: raw(it.activator),
            autoscaler: raw(it.autoscaler),
        }
    }
}

fn level(it: raw::LogLevel) -> Level {
    match it {
        raw::LogLevel::Debug => Level::Debug,
        raw::LogLevel::Info => Level::Info,
        raw::LogLevel::Warn => Level::Warn,
        raw::LogLevel::Error => Level::Error,
    }
}

fn raw_level(it: Level) -> raw::LogLevel {
    match it {
        Level::Debug => raw::LogLevel::Debug,
        Level::Info => raw::LogLevel::Info,
        Level::Warn => raw::LogLevel::Warn,
        Level::Error => raw::LogLevel::Error,
    }
}
