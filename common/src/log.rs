//! Shell: log level of each component in this process, as the operator sets it at run time.
//!
//! A process has one logger, so this state is global too. Components report the level that they received. The process
//! that set up the logger registers a listener, which applies the levels.

use std::sync::{OnceLock, PoisonError, RwLock};

use tracing::info;

use crate::{
    component::Component,
    wire::{LogLevel, LogLevels},
};

/// Returns the level that `levels` gives a component.
pub fn level_of(component: Component, levels: &LogLevels) -> LogLevel {
    match component {
        Component::Controller => levels.controller,
        Component::Agent => levels.agent,
        Component::Activator => levels.activator,
        Component::Autoscaler => levels.autoscaler,
    }
}

type LogLevelListener = Box<dyn Fn(&[(Component, LogLevel)]) + Send + Sync>;

static LISTENER: OnceLock<LogLevelListener> = OnceLock::new();
static LEVELS: RwLock<Vec<(Component, LogLevel)>> = RwLock::new(Vec::new());

/// Registers `listener`, which receives the levels of all components that were set, on every change. The first call
/// wins.
pub fn set_listener(listener: impl Fn(&[(Component, LogLevel)]) + Send + Sync + 'static) {
    let _ = LISTENER.set(Box::new(listener));
}

/// Records the level that a component received, and calls the listener if it changed.
pub fn set_level(component: Component, level: LogLevel) {
    let mut levels = LEVELS.write().unwrap_or_else(PoisonError::into_inner);
    // A component at the default level needs no entry until it has had another one.
    match levels.iter_mut().find(|(it, _)| *it == component) {
        Some((_, now)) if *now == level => return,
        Some((_, now)) => *now = level,
        None if level == LogLevel::default() => return,
        None => levels.push((component, level)),
    }
    // Released first: the listener is code of another crate, and must not run under this lock.
    let all = levels.clone();
    drop(levels);
    // The line comes before the listener lowers the level, since it would be filtered out afterwards.
    info!(part = %component, %level, "log level set");
    if let Some(listener) = LISTENER.get() {
        listener(&all);
    }
}
