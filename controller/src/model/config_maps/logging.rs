//! Pure: `config-logging`: log levels of the components.
//!
//! Keys and messages: knative/pkg `logging/config.go` at 521cb33. Of zap's own settings only the level has an effect.

use std::collections::BTreeMap;

use common::wire::{LogLevel, LogLevels};
use serde::Deserialize;

use super::{ConfigMapSettings, keys::ConfigMapReader};

/// Names of the components. Knative uses the same ones; it has no agent.
const COMPONENTS: [&str; 4] = ["controller", "agent", "activator", "autoscaler"];
/// Rule for levels, as shown in messages.
const RULE: &str = "must be debug, info, warn or error";

/// Parses a level. Zap has three levels above errors, which count as errors here.
fn parse_level(text: &str) -> Option<LogLevel> {
    match text.to_ascii_lowercase().as_str() {
        "debug" => Some(LogLevel::Debug),
        "info" | "" => Some(LogLevel::Info),
        "warn" | "warning" => Some(LogLevel::Warn),
        "error" | "dpanic" | "panic" | "fatal" => Some(LogLevel::Error),
        _ => None,
    }
}

/// `config-logging`, checked: the common level and those of components.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoggingConfig {
    /// Common level: `level` of `zap-logger-config`. Default info.
    pub level: LogLevel,
    components: BTreeMap<String, LogLevel>,
}

impl LoggingConfig {
    /// Level of a component: `loglevel.<component>` where it is set, or else the common one.
    fn level_of(&self, component: &str) -> LogLevel {
        self.components.get(component).copied().unwrap_or(self.level)
    }

    /// Level of each component, as sent in the RouteTable.
    pub fn levels(&self) -> LogLevels {
        let [controller, agent, activator, autoscaler] = COMPONENTS.map(|it| self.level_of(it));
        LogLevels { controller, agent, activator, autoscaler }
    }
}

/// The JSON of `zap-logger-config`.
#[derive(Deserialize)]
struct ZapLoggerConfig {
    #[serde(default)]
    level: String,
    /// Zap's other settings, which have no effect.
    #[serde(flatten)]
    rest: BTreeMap<String, serde::de::IgnoredAny>,
}

impl ConfigMapSettings for LoggingConfig {
    const NAME: &'static str = "config-logging";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        let mut it = Self::default();
        let zap = keys.get("zap-logger-config").unwrap_or_default();
        // An empty value is no JSON, but sets nothing.
        if !zap.trim().is_empty() {
            match serde_json::from_str::<ZapLoggerConfig>(zap) {
                Ok(zap) => it.level = read_zap_level(&zap, keys),
                Err(error) => {
                    keys.add_error(format!("failed to parse \"zap-logger-config\": {error}"))
                }
            }
        }
        for (component, level) in keys.keys_with_prefix("loglevel.") {
            match parse_level(level) {
                _ if level.is_empty() => {}
                Some(level) if COMPONENTS.contains(&component) => {
                    it.components.insert(component.to_owned(), level);
                }
                // Knative has more components, such as `queueproxy`, so this is a warning and no error.
                Some(_) => {
                    let components = COMPONENTS.join(", ");
                    let key = format!("loglevel.{component}");
                    keys.add_warning(format!(
                        "key {key:?} has no effect: the components are {components}"
                    ));
                }
                None => {
                    let key = format!("loglevel.{component}");
                    keys.add_error(format!("invalid logging level: {key:?} is {level:?}: {RULE}"));
                }
            }
        }
        it
    }
}

/// Reads the common level. Other settings of zap get a warning, since they have no effect.
fn read_zap_level(zap: &ZapLoggerConfig, keys: &mut ConfigMapReader<'_>) -> LogLevel {
    if !zap.rest.is_empty() {
        let rest = zap.rest.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        keys.add_warning(format!(
            "{rest} of \"zap-logger-config\" has no effect: only \"level\" has"
        ));
    }
    parse_level(&zap.level).unwrap_or_else(|| {
        let (level, field) = (&zap.level, "\"level\" of \"zap-logger-config\"");
        keys.add_error(format!("invalid logging level: {field} is {level:?}: {RULE}"));
        LogLevel::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        config_maps::{ParsedConfigMap, read},
        problem::problems_line,
    };

    fn map(pairs: &[(&str, &str)]) -> Result<ParsedConfigMap<LoggingConfig>, String> {
        let data = pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        read::<LoggingConfig>(&data).map_err(|it| problems_line(&it))
    }

    #[test]
    fn a_component_has_its_own_level_or_the_common_one() {
        let read = map(&[
            ("zap-logger-config", r#"{"level": "warn"}"#),
            ("loglevel.controller", "debug"),
            ("loglevel.activator", ""),
            ("loglevel.agent", "Fatal"),
        ]);
        let [controller, agent] = [LogLevel::Debug, LogLevel::Error];
        let [activator, autoscaler] = [LogLevel::Warn; 2];
        let read = read.unwrap();
        assert_eq!(read.value.levels(), LogLevels { controller, agent, activator, autoscaler });
        assert_eq!(read.warnings, [] as [&str; 0]);
        assert_eq!(LoggingConfig::default().levels(), LogLevels::default());
    }

    #[test]
    fn an_unknown_component_gets_a_warning() {
        let zap = ("zap-logger-config", r#"{"development": true, "encoding": "console"}"#);
        let read = map(&[("loglevel.queueproxy", "debug"), zap]).unwrap();
        assert_eq!(read.value, LoggingConfig::default());
        let expected = [
            "development, encoding of \"zap-logger-config\" has no effect: only \"level\" has",
            "key \"loglevel.queueproxy\" has no effect: the components are controller, \
             agent, activator, autoscaler",
        ];
        assert_eq!(read.warnings, expected);
    }

    #[test]
    fn an_invalid_level_is_refused_with_the_valid_ones() {
        let rule = "must be debug, info, warn or error";
        assert_eq!(
            map(&[("loglevel.controller", "loud")]),
            Err(format!("invalid logging level: \"loglevel.controller\" is \"loud\": {rule}"))
        );
        assert_eq!(
            map(&[("zap-logger-config", r#"{"level": "loud"}"#)]),
            Err(format!(
                "invalid logging level: \"level\" of \"zap-logger-config\" is \"loud\": {rule}"
            ))
        );
        assert!(map(&[("zap-logger-config", "{")]).is_err());
    }
}
