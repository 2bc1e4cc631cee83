//! Pure: what holds for all services, from protobuf and back.

use super::{
    super::{Level, Levels, RequestLog, Settings},
    Checked, Refused, raw,
};
use crate::request_log::Template;

impl TryFrom<raw::Settings> for Settings {
    type Error = Refused;
    fn try_from(it: raw::Settings) -> Checked<Self> {
        let request_log = it.request_log.map(RequestLog::try_from).transpose()?;
        let levels = it.log_levels.map(Into::into).unwrap_or_default();
        Ok(Self { request_log, levels })
    }
}

impl From<Settings> for raw::Settings {
    fn from(it: Settings) -> Self {
        let levels = (it.levels != Levels::default()).then(|| it.levels.into());
        Self { request_log: it.request_log.map(Into::into), log_levels: levels }
    }
}

impl TryFrom<raw::RequestLog> for RequestLog {
    type Error = Refused;
    fn try_from(it: raw::RequestLog) -> Checked<Self> {
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
