//! Shell: a client that connects to all Services of a set in turn, at a fixed rate.

use std::{
    io::Read as _,
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};

use super::{objects::cluster_ip, proxy::RunningProxy};
use crate::measure::service_connects::SteadyConnects;

/// A running client; killed on drop.
#[derive(Debug)]
pub(super) struct SteadyClient(Child);

impl SteadyClient {
    /// Starts a client that connects once in each `period` for `time`.
    pub(super) fn start(proxy: &RunningProxy, period: Duration, time: Duration) -> Result<Self> {
        let (first, count) = (cluster_ip(0).to_string(), proxy.set.services.to_string());
        let (period_us, millis) = (period.as_micros().to_string(), time.as_millis().to_string());
        let args = ["steady", "--first", &first, "--count", &count, "--every-us", &period_us];
        let mut command = proxy.services_command(&[&args[..], &["--millis", &millis]].concat());
        let child = command.stdout(Stdio::piped()).spawn().context("cannot start a client")?;
        Ok(Self(child))
    }

    /// Waits for its end, and returns its results.
    pub(super) fn wait(mut self) -> Result<SteadyConnects> {
        let mut text = String::new();
        self.0.stdout.take().context("its output was piped")?.read_to_string(&mut text)?;
        self.0.wait()?;
        serde_json::from_str(text.trim())
            .with_context(|| format!("cannot read `{}` of a client", text.trim()))
    }
}

impl Drop for SteadyClient {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
