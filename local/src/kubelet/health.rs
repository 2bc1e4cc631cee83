//! Shell: asks running containers whether they still work, as the kubelet does, and ends those that do not.
//!
//! A startup probe comes first, then the liveness probe goes on until the container ends. Readiness is the agent's.
//! Exec and gRPC probes are not run here; that is logged once. A container whose startup probe is one of them is never
//! known to have started, and its liveness is not asked either: it may only be slow.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream as StdStream};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Container, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, socket};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::{Shared, Work};
use crate::{net, sys};

/// How long a container has to end after it was found dead, unless the pod or probe says: Kubernetes' default.
const GRACE: i64 = 30;
/// Bytes of an answer that are read; its code is in the first.
const HEAD: usize = 512;

/// What is asked.
#[derive(Debug, PartialEq, Eq)]
enum Ask {
    Tcp,
    Http { path: String, host: String, headers: Vec<(String, String)> },
}

/// A probe that is run here.
struct Asked<'a> {
    kind: &'static str,
    probe: &'a Probe,
    ask: Ask,
    port: u16,
}

/// The probes of a container that are run, in their order, and the kinds of those that are not.
fn probes(container: &Container) -> (Vec<Asked<'_>>, Vec<&'static str>) {
    let all = [("startup", &container.startup_probe), ("liveness", &container.liveness_probe)];
    let mut asked = Vec::new();
    let mut left_out = Vec::new();
    for (kind, probe) in all {
        let Some(probe) = probe else { continue };
        // Behind a startup probe that is not run, nothing is.
        match ask_of(probe, container).filter(|_| left_out.is_empty()) {
            Some((ask, port)) => asked.push(Asked { kind, probe, ask, port }),
            None => left_out.push(kind),
        }
    }
    (asked, left_out)
}

/// How long after the begin of its container a probe is asked first.
fn delay(probe: &Probe) -> Duration {
    seconds(i64::from(probe.initial_delay_seconds.unwrap_or(0)))
}

/// Follows one run of a container until its process has ended.
pub(super) async fn follow(
    shared: Arc<Shared>,
    work: Arc<Work>,
    at: usize,
    process: Arc<OwnedFd>,
    addresses: Vec<IpAddr>,
) {
    let started = Instant::now();
    let container = &work.containers[at];
    let Some(ip) = addresses.into_iter().find(IpAddr::is_ipv4) else { return };
    let (probes, left_out) = probes(container);
    for kind in left_out {
        warn!(pod = work.order.name, container = container.name, kind, "probe not run here");
    }
    if probes.is_empty() {
        return;
    }
    // A descriptor of its own: one cannot be waited for twice.
    let watched = process.try_clone().and_then(|own| sys::watch(Arc::new(own)));
    let watched = match watched {
        Ok(watched) => watched,
        Err(error) => return warn!(pod = work.order.name, %error, "container not probed"),
    };
    let asking = async {
        for Asked { kind, probe, ask, port } in &probes {
            let to = SocketAddr::new(ip, *port);
            sleep(delay(probe).saturating_sub(started.elapsed())).await;
            let Err(trouble) = keep_asking(&shared, &work, probe, kind, ask, to).await else {
                continue;
            };
            return Some((*kind, *probe, trouble));
        }
        None
    };
    let failed = tokio::select! {
        _ended = watched.readable() => return,
        failed = asking => failed,
    };
    let Some((kind, probe, trouble)) = failed else { return };
    let (pod, uid, name) = (&work.order.name, &work.order.uid, &container.name);
    info!(pod, uid, container = name, kind, trouble, "container restarted");
    let words = shared.layout.bundle(uid, name).join("termination-log");
    // Best effort: the status only says less without it.
    let _ = std::fs::write(words, format!("{kind} probe failed: {trouble}"));
    let _gone = sys::pidfd_signal(process.as_fd(), libc::SIGTERM);
    let grace = probe.termination_grace_period_seconds;
    let grace = grace.or(work.order.spec.termination_grace_period_seconds).unwrap_or(GRACE);
    if timeout(seconds(grace), watched.readable()).await.is_err() {
        warn!(pod, uid, container = name, "killed after its grace period");
        shared.mounts.kill_container(&shared.layout, uid, name);
    }
}

/// Asks until a startup probe has passed, or until either has failed too often in a row.
async fn keep_asking(
    shared: &Shared,
    work: &Work,
    probe: &Probe,
    kind: &str,
    ask: &Ask,
    to: SocketAddr,
) -> Result<(), String> {
    let positive =
        |value: Option<i32>, usual| i64::from(value.filter(|it| *it > 0).unwrap_or(usual));
    let period = seconds(positive(probe.period_seconds, 10));
    let patience = seconds(positive(probe.timeout_seconds, 1));
    let most = positive(probe.failure_threshold, 3);
    let mut failures = 0;
    loop {
        let asked = timeout(patience, once(shared, &work.order.uid, ask, to)).await;
        let silent = |_| Err(format!("no answer from {to} within {patience:?}"));
        match asked.unwrap_or_else(silent) {
            Ok(()) if kind == "startup" => return Ok(()),
            Ok(()) => failures = 0,
            Err(trouble) => {
                failures += 1;
                if failures >= most {
                    return Err(trouble);
                }
            }
        }
        sleep(period).await;
    }
}

async fn once(shared: &Shared, uid: &str, ask: &Ask, to: SocketAddr) -> Result<(), String> {
    let failed = |error: io::Error| format!("cannot ask {to}: {error}");
    let mut stream = connect(shared, uid, to).await.map_err(failed)?;
    stream.set_zero_linger().map_err(failed)?;
    let Ask::Http { path, host, headers } = ask else { return Ok(()) };
    let named = |name: &str| headers.iter().any(|(have, _)| have.eq_ignore_ascii_case(name));
    let mut head = format!("GET {path} HTTP/1.1\r\nConnection: close\r\nAccept: */*\r\n");
    if !named("host") {
        let host = if host.is_empty() { to.to_string() } else { host.clone() };
        head.push_str(&format!("Host: {host}\r\n"));
    }
    if !named("user-agent") {
        head.push_str("User-Agent: kube-probe/rouse\r\n");
    }
    headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
    stream.write_all(format!("{head}\r\n").as_bytes()).await.map_err(failed)?;
    let mut answer = Vec::new();
    stream.take(HEAD as u64).read_to_end(&mut answer).await.map_err(failed)?;
    match status(&answer) {
        Some(200..=399) => Ok(()),
        Some(code) => Err(format!("GET {path} answered {code}")),
        None => Err(format!("GET {path} was not answered in HTTP")),
    }
}

/// Connects from inside the pod, from loopback: the kernel half counts no request that comes from there.
async fn connect(shared: &Shared, uid: &str, to: SocketAddr) -> io::Result<TcpStream> {
    let make = || {
        let made = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_NONBLOCK, None)?;
        let own = SockaddrIn::from(std::net::SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));
        bind(made.as_raw_fd(), &own)?;
        Ok::<_, nix::Error>(made)
    };
    let namespace = net::open(&shared.layout.pod_namespace(uid)).map_err(io::Error::other)?;
    let inside = move || {
        net::enter(namespace.as_fd()).map_err(io::Error::other)?;
        make().map_err(io::Error::from)
    };
    // A thread of its own: it stays in the pod's namespace until it ends.
    let made = tokio::task::spawn_blocking(|| std::thread::spawn(inside).join()).await;
    let panicked = || io::Error::other("the probe panicked");
    let made = made.map_err(io::Error::other)?.ok().ok_or_else(panicked)??;
    TcpSocket::from_std_stream(StdStream::from(made)).connect(to).await
}

/// The code of an answer's first line.
fn status(answer: &[u8]) -> Option<u16> {
    let line = answer.split(|byte| *byte == b'\r').next()?;
    let code = std::str::from_utf8(line).ok()?.strip_prefix("HTTP/1.")?.split(' ').nth(1)?;
    code.parse().ok()
}

/// What a probe asks, and at which port; `None` where that is not run here.
fn ask_of(probe: &Probe, container: &Container) -> Option<(Ask, u16)> {
    let own = container.ports.iter().flatten().next().map(|port| port.container_port);
    let port = |written: &IntOrString| match written {
        IntOrString::Int(0) => u16::try_from(own?).ok(),
        IntOrString::Int(number) => u16::try_from(*number).ok(),
        IntOrString::String(name) => {
            let mut named = container.ports.iter().flatten();
            let named = named.find(|port| port.name.as_ref() == Some(name))?;
            u16::try_from(named.container_port).ok()
        }
    };
    if let Some(tcp) = &probe.tcp_socket {
        return Some((Ask::Tcp, port(&tcp.port)?));
    }
    let http = probe.http_get.as_ref()?;
    if http.scheme.as_deref().is_some_and(|scheme| scheme.eq_ignore_ascii_case("https")) {
        return None;
    }
    let path = http.path.clone().unwrap_or_default();
    let path = if path.starts_with('/') { path } else { format!("/{path}") };
    let headers = http.http_headers.iter().flatten();
    let headers = headers.map(|one| (one.name.clone(), one.value.clone())).collect();
    Some((
        Ask::Http { path, host: http.host.clone().unwrap_or_default(), headers },
        port(&http.port)?,
    ))
}

fn seconds(count: i64) -> Duration {
    Duration::from_secs(u64::try_from(count).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_is_in_the_first_line() {
        assert_eq!(status(b"HTTP/1.1 204 No Content\r\n\r\n"), Some(204));
        assert_eq!(status(b"HTTP/1.0 500\r\n"), Some(500));
        assert_eq!(status(b"SSH-2.0-OpenSSH\r\n"), None);
    }

    #[test]
    fn behind_a_startup_probe_that_is_not_run_nothing_is_asked() {
        let kinds = |text: &str| {
            let container: Container = serde_json::from_str(text).unwrap();
            let (asked, left_out) = probes(&container);
            (asked.iter().map(|it| it.kind).collect::<Vec<_>>(), left_out)
        };
        let tcp = r#"{"tcpSocket": {"port": 8080}}"#;
        let exec = r#"{"exec": {"command": ["true"]}}"#;
        let both = |startup: &str, liveness: &str| {
            kinds(&format!(
                r#"{{"name": "a", "startupProbe": {startup}, "livenessProbe": {liveness}}}"#
            ))
        };
        assert_eq!(both(tcp, tcp), (vec!["startup", "liveness"], vec![]));
        assert_eq!(both(exec, tcp), (vec![], vec!["startup", "liveness"]));
        assert_eq!(both(tcp, exec), (vec!["startup"], vec!["liveness"]));
        assert_eq!(kinds(r#"{"name": "a"}"#), (vec![], vec![]));
    }

    #[test]
    fn a_port_is_a_number_a_name_or_the_container_s_own() {
        let container = |port: &str| -> Container {
            let text = format!(
                r#"{{"name": "web", "ports": [{{"name": "http1", "containerPort": 8080}}],
                    "livenessProbe": {{"tcpSocket": {{"port": {port}}}}}}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        for (written, want) in
            [("0", Some(8080)), ("9090", Some(9090)), (r#""http1""#, Some(8080)), (r#""no""#, None)]
        {
            let container = container(written);
            let probe = container.liveness_probe.clone().unwrap();
            assert_eq!(ask_of(&probe, &container).map(|(_, port)| port), want, "{written}");
        }
    }
}
