//! Pure: `config-logging`: how much each part logs.
//!
//! Keys and messages: knative/pkg `logging/config.go` at 521cb33. Of zap's own settings only the level means anything
//! here.

use std::{collections::BTreeMap, fmt};

use serde::Deserialize;

use super::{ConfigMap, keys::Keys};

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Level {
    /// What a developer wants.
    Debug,
    /// Every change of state.
    #[default]
    Info,
    /// What a person should look at.
    Warn,
    /// What failed.
    Error,
}

impl Level {
    /// Zap knows three levels above errors; here nothing is worse than one.
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "debug" => Some(Self::Debug),
            "info" | "" => Some(Self::Info),
            "warn" | "warning" => Some(Self::Warn),
            "error" | "dpanic" | "panic" | "fatal" => Some(Self::Error),
            _ => None,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        })
    }
}

/// `config-logging`, checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Logging {
    /// `level` of `zap-logger-config`. Default info.
    pub level: Level,
    components: BTreeMap<String, Level>,
}

impl Logging {
    /// How much a part logs: `loglevel.<part>` where it is set.
    pub fn of(&self, component: &str) -> Level {
        self.components.get(component).copied().unwrap_or(self.level)
    }
}

#[derive(Deserialize)]
struct Zap {
    #[serde(default)]
    level: String,
}

impl ConfigMap for Logging {
    const NAME: &'static str = "config-logging";

    fn read(keys: &mut Keys<'_>) -> Self {
        let mut it = Self::default();
        let zap = keys.get("zap-logger-config").unwrap_or_default();
        if !zap.trim().is_empty() {
            match serde_json::from_str::<Zap>(zap).map(|zap| (Level::parse(&zap.level), zap.level))
            {
                Ok((Some(level), _)) => it.level = level,
                Ok((None, level)) => keys.wrong(format!("invalid logging level: {level}")),
                Err(why) => keys.wrong(format!("failed to parse \"zap-logger-config\": {why}")),
            }
        }
        for (component, level) in keys.with_prefix("loglevel.") {
            match Level::parse(level) {
                _ if component.is_empty() || level.is_empty() => {}
                Some(level) => {
                    it.components.insert(component.to_owned(), level);
                }
                None => keys.wrong(format!("invalid logging level: {level}")),
            }
        }
        it
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config_maps::read, parse::line};

    fn map(pairs: &[(&str, &str)]) -> Result<Logging, String> {
        let data = pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        let read = read::<Logging>(&data).map_err(|it| line(&it))?;
        assert_eq!(read.warnings, [] as [String; 0]);
        Ok(read.value)
    }

    #[test]
    fn a_part_follows_its_own_level_and_then_the_common_one() {
        let read = map(&[
            ("zap-logger-config", r#"{"level": "warn", "development": false}"#),
            ("loglevel.controller", "debug"),
            ("loglevel.activator", ""),
        ]);
        let read = read.unwrap();
        let of = |part| read.of(part);
        assert_eq!([of("controller"), of("activator")], [Level::Debug, Level::Warn]);
        assert_eq!(Logging::default().of("autoscaler"), Level::Info);
    }

    #[test]
    fn a_level_that_is_none_is_refused() {
        let said = Err("invalid logging level: loud".to_owned());
        assert_eq!(map(&[("loglevel.controller", "loud")]), said);
        assert_eq!(map(&[("zap-logger-config", r#"{"level": "loud"}"#)]), said);
        assert!(map(&[("zap-logger-config", "{")]).is_err());
    }
}
