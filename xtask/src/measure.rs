//! Shell: measures connects or requests from the present namespace and cgroup; prints one JSON line.

pub(crate) mod datagrams;
pub(crate) mod service_connects;

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::{JoinSet, LocalSet},
};

use self::{datagrams::DatagramMeasureCommand, service_connects::ServiceMeasureCommand};
use crate::{
    load::{LoadRecord, unix_us},
    sh,
};

/// Arguments of the hidden command `xtask measure`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MeasureArgs {
    #[command(subcommand)]
    what: MeasureCommand,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum MeasureCommand {
    /// Measure connect(2), one call after the other, to each of the addresses in turn
    Connect {
        #[arg(long, value_delimiter = ',', required = true)]
        addr: Vec<SocketAddr>,
        #[arg(long)]
        count: usize,
    },
    /// Send requests on persistent connections, each after the response to the previous one
    Warm {
        #[arg(long)]
        addr: SocketAddr,
        #[arg(long)]
        connections: usize,
        #[arg(long)]
        millis: u64,
    },
    /// Send one request to each of many addresses at once; print the times until their first bytes, in ms
    Burst {
        /// Addresses, each followed by `=` and a Host: 10.96.0.7:80=hello.default
        #[arg(long = "to", value_delimiter = ',', required = true)]
        all: Vec<String>,
        /// Give up after so many seconds
        #[arg(long, default_value_t = 120)]
        timeout_s: u64,
    },
    /// Wait for the first response of an address that refuses at first; print a record like `load`
    First {
        #[arg(long)]
        addr: SocketAddr,
        /// Give up after so many seconds
        #[arg(long, default_value_t = 60)]
        timeout_s: u64,
    },
    /// Connect to Services of a cluster; used by the bench clusterip
    #[command(subcommand)]
    Services(ServiceMeasureCommand),
    /// Exchange datagrams with Services of a cluster; used by the bench clusterip
    #[command(subcommand)]
    Datagrams(DatagramMeasureCommand),
}

/// Times of connects or requests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MeasuredTimes {
    /// Number of connects or requests.
    pub(crate) count: usize,
    /// Time of the whole run, in µs.
    pub(crate) elapsed_us: f64,
    /// Median time of one connect or request, in µs.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// CPU time of the whole machine during the run, in µs.
    pub(crate) cpu_us: f64,
}

/// Results of requests that were sent at once.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct BurstTimes {
    /// Time of sending, Unix time in µs.
    pub(crate) at_us: u64,
    /// Time until the first byte of each response, in ms; for a lost request the time until it was given up.
    pub(crate) ms: Vec<f64>,
    /// Number of requests without a response of status 200.
    pub(crate) lost: usize,
}

/// Runs the hidden command `xtask measure`.
pub(crate) fn run(args: &MeasureArgs) -> Result<()> {
    let measured = match &args.what {
        MeasureCommand::Connect { addr, count } => measure_connects(addr, *count)?,
        MeasureCommand::Services(what) => return service_connects::run(what),
        MeasureCommand::Datagrams(what) => return datagrams::run(what),
        MeasureCommand::Warm { addr, connections, millis } => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let time = Duration::from_millis(*millis);
            LocalSet::new().block_on(&runtime, measure_warm(*addr, *connections, time))?
        }
        MeasureCommand::Burst { all: addresses, timeout_s } => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let times = measure_burst(addresses, Duration::from_secs(*timeout_s));
            println!("{}", serde_json::to_string(&LocalSet::new().block_on(&runtime, times)?)?);
            return Ok(());
        }
        MeasureCommand::First { addr, timeout_s } => {
            println!(
                "{}",
                serde_json::to_string(&measure_first_response(
                    *addr,
                    Duration::from_secs(*timeout_s)
                )?)?
            );
            return Ok(());
        }
    };
    println!("{}", serde_json::to_string(&measured)?);
    Ok(())
}

/// Measures the connect alone. The socket is reset at once, so that no port stays in TIME_WAIT.
fn measure_connects(addresses: &[SocketAddr], count: usize) -> Result<MeasuredTimes> {
    let (cpu, started) = (cpu_us(), Instant::now());
    let mut times = Vec::with_capacity(count);
    for addr in addresses.iter().cycle().take(count) {
        let begin = Instant::now();
        let stream = std::net::TcpStream::connect(addr)
            .with_context(|| format!("cannot connect to {addr}"))?;
        times.push(begin.elapsed());
        // With a linger time of zero, close sends a reset.
        nix::sys::socket::setsockopt(
            &stream,
            nix::sys::socket::sockopt::Linger,
            &nix::libc::linger { l_onoff: 1, l_linger: 0 },
        )?;
    }
    Ok(MeasuredTimes::from_times(times, started.elapsed(), cpu_us() - cpu))
}

/// Sends all requests at once. A request without a response counts with the whole time of waiting.
async fn measure_burst(addresses: &[String], timeout: Duration) -> Result<BurstTimes> {
    let at_us = unix_us();
    let mut tasks = JoinSet::new();
    for address in addresses {
        let (addr, host) =
            address.split_once('=').with_context(|| format!("`{address}` has no Host"))?;
        let (addr, host): (SocketAddr, String) = (addr.parse()?, host.to_owned());
        tasks.spawn_local(async move {
            let begin = Instant::now();
            let answered = tokio::time::timeout(timeout, read_first_bytes(addr, &host)).await;
            (begin.elapsed().as_secs_f64() * 1e3, matches!(answered, Ok(Ok(()))))
        });
    }
    let results = tasks.join_all().await;
    let lost = results.iter().filter(|(_, answered)| !answered).count();
    Ok(BurstTimes { at_us, ms: results.into_iter().map(|(ms, _)| ms).collect(), lost })
}

/// Sends one request on a new connection, and reads the first bytes of the response.
async fn read_first_bytes(addr: SocketAddr, host: &str) -> Result<()> {
    let mut stream = TcpStream::connect(addr).await?;
    let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).await?;
    if &head != b"HTTP/1.1 200" {
        bail!("the response was {}", String::from_utf8_lossy(&head));
    }
    Ok(())
}

/// Sends requests until one gets a response, at most a few hundred a second.
fn measure_first_response(addr: SocketAddr, timeout: Duration) -> Result<LoadRecord> {
    let (started, at_us) = (Instant::now(), unix_us());
    while started.elapsed() < timeout {
        // Refused connects and timeouts are expected while no pod is ready.
        if let Ok((head, first_byte)) = try_request(addr, started) {
            let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name));
            let word = |name: &str| field(name).unwrap_or_default().trim().to_owned();
            let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
            return Ok(LoadRecord {
                at_us,
                took_us: micros(started.elapsed()),
                first_byte_us: micros(first_byte),
                status: 200,
                fresh: true,
                pod: word("x-pod:"),
                direct: false,
                listening_us: word("x-listening-us:").parse().unwrap_or(0),
                error: String::new(),
            });
        }
        sh::sleep(Duration::from_millis(2));
    }
    bail!("no response from {addr} within {} s", timeout.as_secs())
}

/// Longest time for a connect to a pod of the same machine.
///
/// kube-proxy rejects connects to a Service without endpoints by ICMP, and the kernel sends a client one such error a
/// second (`net.ipv4.icmp_ratelimit`). A connect that gets no error waits in vain, also when the pod is ready by then.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(20);

/// Sends one request on a new connection. Returns the response's head, and the time of its first byte.
fn try_request(addr: SocketAddr, started: Instant) -> Result<(String, Duration)> {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect_timeout(&addr, CONNECT_TIMEOUT)?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: hello\r\nConnection: close\r\n\r\n")?;
    let mut buffer = [0; 4096];
    let read = stream.read(&mut buffer)?;
    let first_byte = started.elapsed();
    let head = String::from_utf8_lossy(&buffer[..read]).into_owned();
    if !head.starts_with("HTTP/1.1 200") {
        bail!("the response was {}", head.lines().next().unwrap_or_default());
    }
    Ok((head, first_byte))
}

/// Measures requests over open connections for a time.
async fn measure_warm(
    addr: SocketAddr,
    connections: usize,
    time: Duration,
) -> Result<MeasuredTimes> {
    let mut streams = Vec::new();
    for _ in 0..connections {
        let mut stream = TcpStream::connect(addr).await.context("cannot connect")?;
        stream.set_nodelay(true)?;
        // The first response is not measured: it finds cold caches, and the pod is busy with accepting.
        send_get(&mut stream, &mut [0; 4096]).await?;
        streams.push(stream);
    }
    let (cpu, started) = (cpu_us(), Instant::now());
    let mut tasks = JoinSet::new();
    for mut stream in streams {
        tasks.spawn_local(async move {
            let (mut times, mut buffer) = (Vec::new(), [0; 4096]);
            while started.elapsed() < time {
                let begin = Instant::now();
                send_get(&mut stream, &mut buffer).await?;
                times.push(begin.elapsed());
            }
            anyhow::Ok(times)
        });
    }
    let mut times = Vec::new();
    while let Some(result) = tasks.join_next().await {
        times.extend(result.context("a client ended early")??);
    }
    Ok(MeasuredTimes::from_times(times, started.elapsed(), cpu_us() - cpu))
}

/// Sends one small GET. Without an HTTP library, so that the client's own CPU time does not hide the server's.
async fn send_get(stream: &mut TcpStream, buffer: &mut [u8; 4096]) -> Result<()> {
    stream.write_all(b"GET / HTTP/1.1\r\nHost: hello\r\n\r\n").await?;
    let mut length = 0;
    loop {
        let read = stream.read(&mut buffer[length..]).await?;
        if read == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        length += read;
        if is_complete(&buffer[..length])? {
            return Ok(());
        }
    }
}

/// Returns true if `bytes` hold a whole response with a content-length.
fn is_complete(bytes: &[u8]) -> Result<bool> {
    let Some(head_end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
        return Ok(false);
    };
    let head = std::str::from_utf8(&bytes[..head_end])?;
    if !head.starts_with("HTTP/1.1 200") {
        bail!("the response was {}", head.lines().next().unwrap_or_default());
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.context("a response without content-length")?.parse()?;
    Ok(bytes.len() >= head_end + 4 + length)
}

impl MeasuredTimes {
    fn from_times(mut times: Vec<Duration>, elapsed: Duration, cpu_us: f64) -> Self {
        times.sort_unstable();
        let value_at = |share: f64| {
            let rank = (times.len() as f64 * share) as usize;
            times.get(rank).map_or(f64::NAN, |time| time.as_secs_f64() * 1e6)
        };
        Self {
            count: times.len(),
            elapsed_us: elapsed.as_secs_f64() * 1e6,
            p50_us: value_at(0.5),
            p99_us: value_at(0.99),
            cpu_us,
        }
    }
}

/// Busy CPU time of the whole machine, in µs, including softirq work.
pub(crate) fn cpu_us() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat.lines().next().unwrap_or_default();
    let ticks: Vec<f64> =
        line.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq, …: all but idle and iowait. Steal is time of other machines.
    let busy: f64 = [0, 1, 2, 5, 6].iter().filter_map(|&index| ticks.get(index)).sum();
    // USER_HZ is 100, so a tick is 10 ms.
    busy * 10_000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_complete_when_its_body_is() {
        let whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi";
        assert!(is_complete(whole).unwrap());
        assert!(!is_complete(&whole[..whole.len() - 1]).unwrap());
        assert!(!is_complete(b"HTTP/1.1 200 OK\r\n").unwrap());
        assert!(is_complete(b"HTTP/1.1 503 no\r\n\r\n").is_err());
    }
}
