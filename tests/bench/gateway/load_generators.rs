//! Shell: clients at their highest rate: wrk for HTTP/1.1, h2load for HTTP/2 and gRPC.

use std::{
    net::Ipv4Addr,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    cases::{GatewayPort, LoadClient, ThroughputLoad},
    pods::GRPC_MESSAGE,
};

/// Time without any byte after which h2load ends a connection, whose requests then count as timed out.
const INACTIVITY_TIMEOUT: &str = "20s";

/// Results that a client reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadedRate {
    pub(crate) requests: f64,
    pub(crate) per_s: f64,
}

/// One run of a client. The clients run on the bench's own core, which they inherit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadRun<'a> {
    pub(crate) load: ThroughputLoad,
    pub(crate) to: Ipv4Addr,
    /// Length of the run for wrk, in seconds.
    pub(crate) seconds: u32,
    /// Number of requests for h2load, which takes a number instead of a time.
    pub(crate) requests: u64,
    /// File with the body of a call of gRPC.
    pub(crate) grpc_message: &'a Path,
}

impl LoadRun<'_> {
    /// Sends the requests. An unsuccessful response is an error.
    pub(crate) fn run(&self) -> Result<LoadedRate> {
        match self.load.client {
            LoadClient::Wrk { connections } => self.run_wrk(connections),
            LoadClient::H2load { connections, streams } => self.run_h2load(connections, streams),
        }
    }

    fn run_wrk(&self, connections: u32) -> Result<LoadedRate> {
        let ThroughputLoad { port, path, .. } = self.load;
        let mut wrk = Command::new("wrk");
        wrk.args(["-t1", &format!("-c{connections}"), &format!("-d{}", self.seconds)]);
        wrk.args(["--timeout", "10", "-H", &format!("Host: {}", port.host())]);
        wrk.arg(format!("{}://{}:{}{path}", port.scheme(), self.to, port.number()));
        let output = output_of(&mut wrk)?;
        let has_errors = ["Socket errors", "Non-2xx"].iter().any(|word| output.contains(word));
        ensure!(!has_errors, "wrk met errors: {output}");
        let requests =
            find_number(&output, |line| line.split_once(" requests in ")?.0.trim().parse().ok())?;
        let per_s =
            find_number(&output, |line| line.strip_prefix("Requests/sec:")?.trim().parse().ok())?;
        Ok(LoadedRate { requests, per_s })
    }

    fn run_h2load(&self, connections: u32, streams: u32) -> Result<LoadedRate> {
        let ThroughputLoad { port, path, .. } = self.load;
        let mut h2load = Command::new("h2load");
        h2load.args(["-t1", &format!("-c{connections}"), &format!("-m{streams}")]);
        // Without a timeout, a response that never comes would hold up the bench forever.
        h2load.args(["-N", INACTIVITY_TIMEOUT]);
        h2load.arg(format!("-n{}", self.requests)).arg("--connect-to");
        h2load.arg(format!("{}:{}", self.to, port.number()));
        if port == GatewayPort::Grpc {
            h2load.args(["-H", "content-type: application/grpc", "-H", "te: trailers", "-d"]);
            h2load.arg(self.grpc_message);
        }
        h2load.arg(format!("{}://{}:{}{path}", port.scheme(), port.host(), port.number()));
        let output = output_of(&mut h2load)?;
        let expected = format!("{} succeeded, 0 failed, 0 errored, 0 timeout", self.requests);
        ensure!(output.contains(&expected), "h2load met errors: {output}");
        if port == GatewayPort::Grpc {
            // A call that fails has the status 200 as well, but no message.
            let bytes = find_number(&output, |line| {
                let (before, _) = line.strip_prefix("traffic: ")?.split_once(") data")?;
                before.rsplit('(').next()?.parse().ok()
            })?;
            let is_answered = bytes >= self.requests as f64 * GRPC_MESSAGE.len() as f64;
            ensure!(is_answered, "calls of gRPC failed: {output}");
        }
        let is_http2 = port != GatewayPort::Tls || output.contains("Application protocol: h2");
        ensure!(is_http2, "no HTTP/2 by ALPN: {output}");
        let per_s = find_number(&output, |line| {
            let (before, _) = line.strip_prefix("finished in ")?.split_once(" req/s")?;
            before.rsplit(' ').next()?.parse().ok()
        })?;
        Ok(LoadedRate { requests: self.requests as f64, per_s })
    }
}

fn output_of(command: &mut Command) -> Result<String> {
    let done = command.stdin(Stdio::null()).output();
    let done = done.with_context(|| format!("cannot start {command:?}"))?;
    let output = String::from_utf8_lossy(&done.stdout).into_owned();
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{command:?} failed: {output}{errors}");
    Ok(output)
}

fn find_number(output: &str, find: impl Fn(&str) -> Option<f64>) -> Result<f64> {
    output.lines().find_map(find).with_context(|| format!("no figure in: {output}"))
}
