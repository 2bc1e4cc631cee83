//! Shell: the log of a component in a process of its own: its format and its level.

use std::ffi::OsStr;

use common::{component::Component, log, wire::LogLevel};
use tracing_subscriber::{EnvFilter, filter::ParseError};

/// Logs to standard error from now on. `RUST_LOG` selects the level. Without a valid one, the operator's config-logging
/// selects it, also while the component runs.
pub(crate) fn init() {
    let parsed = parse_filter(std::env::var_os(EnvFilter::DEFAULT_ENV).as_deref());
    let (chosen, refused) = match parsed {
        Ok(chosen) => (chosen, None),
        Err(error) => (None, Some(error)),
    };
    let is_chosen = chosen.is_some();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(chosen.unwrap_or_else(|| level_filter("", LogLevel::Info)))
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_filter_reloading();
    let handle = builder.reload_handle();
    builder.init();
    if let Some(error) = refused {
        tracing::warn!(%error, "RUST_LOG is ignored: use a level such as info, or CRATE=LEVEL,…");
    }
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

/// Returns the filter that `RUST_LOG` selects; `None` if the variable is not set or empty. An empty filter would hide
/// all but errors.
fn parse_filter(value: Option<&OsStr>) -> Result<Option<EnvFilter>, ParseError> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
    // What is no UTF-8 is no directive either, and the error shows it.
    EnvFilter::try_new(value.to_string_lossy()).map(Some)
}

fn level_filter(component: &str, level: LogLevel) -> EnvFilter {
    EnvFilter::new(filter_directives(component, level))
}

/// Crates that log each failed attempt. Our own crates log each outage of the API server once, and count handshakes.
/// Clients outside cause warnings of rustls at will, for example by an address as the name of a host.
const QUIET_CRATES: &str = "kube_client=off,kube_runtime=error,rustls=error";

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
    fn rust_log_selects_the_filter_unless_it_is_empty_or_broken() {
        let parse = |value: &str| parse_filter(Some(OsStr::new(value)));
        assert!(parse_filter(None).is_ok_and(|it| it.is_none()));
        assert!(parse("").is_ok_and(|it| it.is_none()));
        assert_eq!(parse("warn,agent=debug").unwrap().unwrap().to_string(), "agent=debug,warn");
        assert!(parse("agent=loud").is_err());
    }

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
        assert!(filter_directives("activator", LogLevel::Info).contains(",rustls=error"));
        let directives = filter_directives("controller", LogLevel::Debug);
        let own = "info,common=debug,registry=debug,controller=debug";
        assert_eq!(directives, format!("{own},{QUIET_CRATES}"));
    }
}
