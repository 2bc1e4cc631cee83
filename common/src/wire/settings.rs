//! Pure: what operators set for all services at once, as other parts are told.

use std::fmt;

use crate::request_log::Template;

/// What operators set for all services at once. The table says nothing of it while everything is as usual.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// How finished requests are logged; `None`: not at all.
    pub request_log: Option<RequestLog>,
    /// How much each part logs of itself.
    pub levels: Levels,
}

impl Settings {
    /// What the table says of them: nothing while all is as usual.
    pub fn said(&self) -> Option<Self> {
        (*self != Self::default()).then(|| self.clone())
    }
}

/// How much each part logs of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Levels {
    /// Controllers.
    pub controller: Level,
    /// Agents.
    pub agent: Level,
    /// Activators.
    pub activator: Level,
    /// Autoscalers.
    pub autoscaler: Level,
}

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

/// How activators log finished requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestLog {
    /// The line of one.
    pub template: Template,
    /// Whether those that ask the platform are logged too.
    pub probes: bool,
}
