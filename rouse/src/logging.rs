//! Shell: the log of a component in a process of its own: its format and its level.

use common::{component::Component, log, wire::LogLevel};
use tracing_subscriber::EnvFilter;

/// Logs to standard error from now on. `RUST_LOG` selects the level. Without a valid one, the operator's config-logging
/// selects it, also while the component runs.
pub(crate) fn init() {
    let chosen = EnvFilter::try_from_default_env();
    let is_chosen = chosen.is_ok();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(chosen.unwrap_or_else(|_unset_or_bad| level_filter("", LogLevel::Info)))
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_filter_reloading();
    let handle = builder.reload_handle();
    builder.init();
    // RUST_LOG wins over the operator's config-logging for as long as the process runs.
    if is_chosen {
        return;
    }
    log::set_listener(move |levels| {
        // Only one component runs in this process.
        let Some((component, level)) = levels.last() else { return };
        if let Err(error) = handle.reload(level_filter(component.name(), *level)) {
            tracing::warn!(%error, "cannot change the log level");
        }
    });
}

fn level_filter(component: &str, level: LogLevel) -> EnvFilter {
    EnvFilter::new(filter_directives(component, level))
}

/// Crates of the client of the API server. They log each failed attempt, and our own crates log each outage once.
const QUIET_CRATES: &str = "kube_client=off,kube_runtime=error";

/// Filter directives: level debug applies only to Rouse's own crates, because libraries log far more.
fn filter_directives(component: &str, level: LogLevel) -> String {
    let own = match level {
        // The controller's queries of registries are in a crate of their own.
        LogLevel::Debug if component == Component::Controller.name() => {
            format!("info,common=debug,registry=debug,{component}=debug")
        }
        LogLevel::Debug => format!("info,common=debug,{component}=debug"),
        LogLevel::Info | LogLevel::Warn | LogLevel::Error => level.to_string(),
    };
    format!("{own},{QUIET_CRATES}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_crates_are_debugged() {
        for (level, filter) in [
            (LogLevel::Debug, "info,common=debug,agent=debug"),
            (LogLevel::Info, "info"),
            (LogLevel::Warn, "warn"),
            (LogLevel::Error, "error"),
        ] {
            assert_eq!(filter_directives("agent", level), format!("{filter},{QUIET_CRATES}"));
            assert!(EnvFilter::try_new(filter_directives("agent", level)).is_ok());
        }
        let directives = filter_directives("controller", LogLevel::Debug);
        let own = "info,common=debug,registry=debug,controller=debug";
        assert_eq!(directives, format!("{own},{QUIET_CRATES}"));
    }
}
