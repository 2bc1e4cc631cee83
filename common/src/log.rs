//! Shell: how much each part of this process logs, as the operator sets it while it runs.
//!
//! The logger is one for the whole process, and so is this. Parts tell what they were told; whoever has set up the logger
//! listens, and decides what comes of it.

use std::{
    fmt,
    sync::{OnceLock, PoisonError, RwLock},
};

use tracing::info;

use crate::wire::{Level, Levels, Role};

/// A part that logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Speaker {
    /// The controller.
    Controller,
    /// An agent.
    Agent,
    /// An activator.
    Activator,
    /// An autoscaler.
    Autoscaler,
}

impl Speaker {
    /// Its name: of the part, of its crate, and in `loglevel.<name>`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Agent => "agent",
            Self::Activator => "activator",
            Self::Autoscaler => "autoscaler",
        }
    }

    /// How much it is to log.
    pub fn level(self, levels: &Levels) -> Level {
        match self {
            Self::Controller => levels.controller,
            Self::Agent => levels.agent,
            Self::Activator => levels.activator,
            Self::Autoscaler => levels.autoscaler,
        }
    }
}

impl From<Role> for Speaker {
    fn from(it: Role) -> Self {
        match it {
            Role::Agent => Self::Agent,
            Role::Activator => Self::Activator,
            Role::Autoscaler => Self::Autoscaler,
        }
    }
}

impl fmt::Display for Speaker {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

type Listener = Box<dyn Fn(&[(Speaker, Level)]) + Send + Sync>;

static LISTENER: OnceLock<Listener> = OnceLock::new();
static LEVELS: RwLock<Vec<(Speaker, Level)>> = RwLock::new(Vec::new());

/// From now on `listener` hears of every change: all parts that were told something, and what. The first one counts.
pub fn listen(listener: impl Fn(&[(Speaker, Level)]) + Send + Sync + 'static) {
    let _ = LISTENER.set(Box::new(listener));
}

/// A part was told how much to log.
pub fn set(speaker: Speaker, level: Level) {
    let mut levels = LEVELS.write().unwrap_or_else(PoisonError::into_inner);
    match levels.iter_mut().find(|(it, _)| *it == speaker) {
        Some((_, now)) if *now == level => return,
        Some((_, now)) => *now = level,
        None if level == Level::default() => return,
        None => levels.push((speaker, level)),
    }
    let all = levels.clone();
    drop(levels);
    // Before the level falls, or nobody would read it.
    info!(part = %speaker, %level, "log level set");
    if let Some(listener) = LISTENER.get() {
        listener(&all);
    }
}
