//! Shell: log level of each component in this process, as the operator sets it at run time.
//!
//! A process has one logger, so this state is global too. Components report the level that they received. The process
//! that set up the logger registers a listener, which applies the levels.

use std::{
    fmt,
    sync::{OnceLock, PoisonError, RwLock},
};

use tracing::info;

use crate::wire::{ComponentRole, LogLevel, LogLevels};

/// Component that logs in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogComponent {
    /// The controller, in its own process or within `rouse up`.
    Controller,
    /// The agent of this node.
    Agent,
    /// An activator, one per replica.
    Activator,
    /// An autoscaler, one per replica.
    Autoscaler,
}

impl LogComponent {
    /// Returns the component's name, which is also its crate's name and the suffix in `loglevel.<name>`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Agent => "agent",
            Self::Activator => "activator",
            Self::Autoscaler => "autoscaler",
        }
    }

    /// Returns the level that `levels` gives this component.
    pub fn level(self, levels: &LogLevels) -> LogLevel {
        match self {
            Self::Controller => levels.controller,
            Self::Agent => levels.agent,
            Self::Activator => levels.activator,
            Self::Autoscaler => levels.autoscaler,
        }
    }
}

impl From<ComponentRole> for LogComponent {
    fn from(role: ComponentRole) -> Self {
        match role {
            ComponentRole::Agent => Self::Agent,
            ComponentRole::Activator => Self::Activator,
            ComponentRole::Autoscaler => Self::Autoscaler,
        }
    }
}

impl fmt::Display for LogComponent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

type LogLevelListener = Box<dyn Fn(&[(LogComponent, LogLevel)]) + Send + Sync>;

static LISTENER: OnceLock<LogLevelListener> = OnceLock::new();
static LEVELS: RwLock<Vec<(LogComponent, LogLevel)>> = RwLock::new(Vec::new());

/// Registers `listener`, which receives the levels of all components that were set, on every change. The first call
/// wins.
pub fn set_listener(listener: impl Fn(&[(LogComponent, LogLevel)]) + Send + Sync + 'static) {
    let _ = LISTENER.set(Box::new(listener));
}

/// Records the level that a component received, and calls the listener if it changed.
pub fn set_level(speaker: LogComponent, level: LogLevel) {
    let mut levels = LEVELS.write().unwrap_or_else(PoisonError::into_inner);
    // A component at the default level needs no entry until it has had another one.
    match levels.iter_mut().find(|(it, _)| *it == speaker) {
        Some((_, now)) if *now == level => return,
        Some((_, now)) => *now = level,
        None if level == LogLevel::default() => return,
        None => levels.push((speaker, level)),
    }
    // Released first: the listener is code of another crate, and must not run under this lock.
    let all = levels.clone();
    drop(levels);
    // The line comes before the listener lowers the level, since it would be filtered out afterwards.
    info!(part = %speaker, %level, "log level set");
    if let Some(listener) = LISTENER.get() {
        listener(&all);
    }
}
