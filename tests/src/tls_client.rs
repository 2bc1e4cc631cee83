//! Third-party TLS clients at a gateway: curl, OpenSSL's `s_client`, h2load, and those in Go, Node and Python.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use crate::tls_files::first_certificate;
use crate::wait::wait_for;

/// Requests of one run of h2load under which certificates change.
const REQUESTS_OF_RUN: usize = 500;

/// Clients of one gateway, which trust one authority.
#[derive(Clone, Debug)]
pub struct TlsClients {
    /// Address of the gateway's port of TLS.
    pub gateway: SocketAddr,
    /// File with the certificate of the authority.
    pub authority: PathBuf,
    /// Program before the clients, with its arguments: it runs them in another network namespace. Empty: none.
    pub runner: Vec<String>,
}

impl TlsClients {
    /// Command of a client.
    fn command(&self, program: &str) -> Command {
        let words = self.runner.iter().map(String::as_str).chain([program]).collect::<Vec<_>>();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::null());
        command
    }

    /// URL of the root of a host at the gateway.
    pub fn url(&self, host: &str) -> String {
        format!("https://{host}:{}/", self.gateway.port())
    }

    /// Status and HTTP version of curl's response, such as `200 2`. Panics without a verified response.
    pub fn curl(&self, host: &str, args: &[&str]) -> String {
        let (ip, port) = (self.gateway.ip(), self.gateway.port());
        let mut curl = self.command("curl");
        curl.args(["--silent", "--show-error", "--noproxy", "*", "--max-time", "60"]);
        curl.args(["--connect-to", &format!("{host}:{port}:{ip}:{port}"), "--cacert"]);
        curl.arg(&self.authority).args(args).args(["--output", "/dev/null"]);
        curl.args(["--write-out", "%{http_code} %{http_version}", &self.url(host)]);
        output_of(&mut curl)
    }

    /// All that OpenSSL's client prints of one handshake with these arguments, errors included.
    pub fn s_client(&self, args: &[&str]) -> String {
        let mut client = self.command("openssl");
        client.args(["s_client", "-connect", &self.gateway.to_string(), "-CAfile"]);
        client.arg(&self.authority).args(args);
        let Output { stdout, stderr, .. } = client.output().expect("openssl is installed");
        String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned()
    }

    /// Own certificate that the gateway sends for a host, in base64 without line ends; `None` without a handshake.
    pub fn served_certificate(&self, host: &str) -> Option<String> {
        first_certificate(&self.s_client(&["-servername", host]))
    }

    /// Sends `requests` requests by HTTP/2 over four connections. Panics if one of them failed.
    pub fn h2load(&self, host: &str, requests: usize) {
        let (gateway, count) = (self.gateway.to_string(), requests.to_string());
        let mut h2load = self.command("h2load");
        h2load.args(["-n", &count, "-c", "4", "-m", "16", "--connect-to", &gateway]);
        let output = output_of(h2load.arg(self.url(host)));
        let expected = format!("{requests} succeeded, 0 failed, 0 errored, 0 timeout");
        assert!(output.contains(&expected), "{output}");
        let negotiated = output.contains("Application protocol: h2");
        assert!(negotiated, "no HTTP/2 by ALPN: {output}");
    }

    /// Runs `work` under load on a host by HTTP/2 over TLS. Panics if one request failed.
    pub fn with_load(&self, host: &str, work: impl FnOnce(&RepeatedLoad)) {
        let load = RepeatedLoad::default();
        thread::scope(|scope| {
            scope.spawn(|| {
                while !load.stop.load(Ordering::Relaxed) {
                    self.h2load(host, REQUESTS_OF_RUN);
                    load.finished_runs.fetch_add(1, Ordering::Relaxed);
                }
            });
            let _stop = StopOnDrop(&load);
            work(&load);
        });
    }

    /// Runs a client of `tests/servers`, `PROGRAM https URL CA COUNT`, and returns its output. Panics if it failed.
    pub fn run_https(&self, program: &[&str], host: &str, count: usize) -> String {
        let mut client = self.command(program[0]);
        client.args(&program[1..]).args(["https", &self.url(host)]).arg(&self.authority);
        // The name is in no DNS.
        client.arg(count.to_string()).env("CONNECT", self.gateway.ip().to_string());
        output_of(&mut client)
    }
}

/// Runs of h2load, one after the other, each with connections of its own.
#[derive(Debug, Default)]
pub struct RepeatedLoad {
    stop: AtomicBool,
    finished_runs: AtomicUsize,
}

impl RepeatedLoad {
    /// Waits until a run that began after this call has ended.
    pub fn wait_for_another_run(&self) {
        let before = self.finished_runs.load(Ordering::Relaxed);
        wait_for("another run of the load", || {
            (self.finished_runs.load(Ordering::Relaxed) >= before + 2).then_some(())
        });
    }
}

/// Stops the load also if a check has failed: the scope would wait for it forever.
struct StopOnDrop<'a>(&'a RepeatedLoad);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// Path of a client in `tests/servers` that needs no build.
pub fn client_script(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("servers").join(name).display().to_string()
}

/// Output of a command that must succeed.
fn output_of(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {stderr}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}
