//! Pure: command-line settings of the autoscaler.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Args;
use common::replicas;

/// Command-line settings of the autoscaler.
#[derive(Args, Clone, Debug)]
pub struct AutoscalerConfig {
    /// Endpoint at which agents and activators report usage: `unix:/path`, `http://ip:port` or `https://ip:port`.
    #[arg(long, env = "ROUSE_USAGE", default_value = "unix:/run/rouse/rouse/autoscaler.sock")]
    pub usage: String,

    /// Endpoints of the controller, for routes and decisions: `unix:/path`, `dns:NAME:PORT`, or `http://ip:port` or
    /// `https://ip:port`, several joined by commas.
    #[arg(long, env = "ROUSE_CONTROLLER", default_value = "unix:/run/rouse/rouse/controller.sock")]
    pub controller: String,

    /// Folder with `token` (projected, audience `rouse`) and `ca.pem` (the controller's authorities): with it, streams
    /// to `dns:` and `https:` replicas use mutual TLS. None: no TLS.
    #[arg(long, env = "ROUSE_IDENTITY")]
    pub identity: Option<PathBuf>,

    /// Address that serves /healthz, /readyz and /metrics.
    #[arg(long, env = "ROUSE_AUTOSCALER_ADMIN", default_value = "127.0.0.1:7102")]
    pub admin: SocketAddr,

    /// Name of this replica, unique among autoscalers.
    #[arg(long, env = "ROUSE_NAME", default_value = "autoscaler")]
    pub name: String,

    /// Milliseconds between two evaluations of a Revision's load, 100 to 60000.
    ///
    /// Knative: 2 s (`pkg/autoscaler/scaling/multiscaler.go` at 98e5ef9). Urgent load is evaluated at once.
    #[arg(long, env = "ROUSE_TICK_MS", default_value_t = 2000)]
    pub tick_ms: u64,
}

/// Error of a setting outside its range: its name, its value and the rule it breaks.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{name} is {value:?}: {rule}")]
pub struct AutoscalerConfigError {
    name: &'static str,
    value: String,
    rule: &'static str,
}

impl AutoscalerConfig {
    /// Checks each setting against its range, and those that need an identity against `--identity`.
    pub fn validate(&self) -> Result<(), AutoscalerConfigError> {
        let bad = |name, value: &str, rule| {
            Err(AutoscalerConfigError { name, value: value.to_owned(), rule })
        };
        if !(100..=60_000).contains(&self.tick_ms) {
            return bad("tick-ms", &self.tick_ms.to_string(), "must be 100 to 60000 milliseconds");
        }
        if self.name.is_empty() {
            return bad("name", &self.name, "must not be empty");
        }
        if self.usage.parse::<replicas::ReplicaEndpoint>().is_err() {
            return bad(
                "usage",
                &self.usage,
                "must be unix:/path, http://IP:PORT or https://IP:PORT",
            );
        }
        let Ok(controller) = self.controller.parse::<replicas::EndpointSetting>() else {
            return bad("controller", &self.controller, replicas::ENDPOINT_RULE);
        };
        // Without an identity there is no certificate, so addresses that demand TLS could never connect.
        if controller.needs_identity() && self.identity.is_none() {
            return bad("controller", &self.controller, "needs --identity");
        }
        if self.usage.starts_with("https://") && self.identity.is_none() {
            return bad("usage", &self.usage, "needs --identity");
        }
        Ok(())
    }

    /// Time between two evaluations of a Revision's load.
    pub fn tick(&self) -> Duration {
        Duration::from_millis(self.tick_ms)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct AutoscalerCliFixture {
        #[command(flatten)]
        config: AutoscalerConfig,
    }

    fn config(args: &[&str]) -> AutoscalerConfig {
        AutoscalerCliFixture::parse_from([&["autoscaler"], args].concat()).config
    }

    #[test]
    fn defaults_are_in_range() {
        assert_eq!(config(&[]).validate(), Ok(()));
    }

    #[test]
    fn a_bad_value_is_refused_with_name_value_and_range() {
        let refused = config(&["--tick-ms", "5"]).validate().expect_err("too short");
        assert_eq!(refused.to_string(), "tick-ms is \"5\": must be 100 to 60000 milliseconds");
        let refused = config(&["--usage", "/tmp/x"]).validate().expect_err("not an endpoint");
        assert!(refused.to_string().starts_with("usage is \"/tmp/x\""));
    }
}
