//! Shell: nginx as the server of a pod and as a proxy in front of it, one process each.

use std::{
    cell::Cell,
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::Child,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use nix::sched::{CloneFlags, setns};

use crate::{
    fixture::{NetnsFixture, SERVING_PORT},
    load_generators::netns_command,
};

/// Port of the server beside the pod's serving port.
pub(crate) const OTHER_PORT: u16 = 8090;
/// Port on which the proxy listens.
pub(crate) const PROXY_PORT: u16 = 8012;
/// Port of the status page, with the number of requests that the server has begun.
const STATUS_PORT: u16 = 8099;
/// Size of the response of `/bulk`.
const BULK_BYTES: usize = 1 << 20;
const WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// A running nginx, killed on drop.
#[derive(Debug)]
pub(crate) struct BenchNginx {
    child: Child,
    netns: String,
    /// Number of requests for the status page, which nginx counts as well.
    status_requests: Cell<u64>,
}

/// Counts of a server's status page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NginxStatus {
    /// Number of requests that it has begun.
    pub(crate) requests: u64,
    /// Number of its open connections.
    pub(crate) open: u64,
}

impl BenchNginx {
    /// Starts the server of a pod. With `h2`, its serving port accepts only HTTP/2 without TLS.
    pub(crate) fn server(pod: &NetnsFixture, core: usize, folder: &Path, h2: bool) -> Result<Self> {
        let folder = folder.join(format!("server{}", pod.number));
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("bulk"), vec![b'x'; BULK_BYTES])?;
        let listens = if h2 { format!("{SERVING_PORT} http2") } else { SERVING_PORT.to_string() };
        // 400 bytes of response head, as frameworks send them to browsers.
        let headers = [
            "Cache-Control 'no-cache, private, must-revalidate'",
            "Content-Security-Policy \"default-src 'self'; img-src 'self' data:\"",
            "Set-Cookie 'session=0123456789abcdef0123456789abcdef; Path=/; HttpOnly'",
            "Vary 'Accept-Encoding, Cookie'",
            "X-Request-Id 01234567-89ab-cdef-0123-456789abcdef",
        ];
        let headers: String = headers.iter().map(|it| format!("add_header {it}; ")).collect();
        let config = format!(
            "server {{
                listen {listens}; listen {OTHER_PORT}; root {folder};
                location = / {{ return 200 hello; }}
                location = /browser {{ {headers} return 200 hello; }}
                location = /bulk {{ }}
            }}
            server {{ listen {STATUS_PORT}; location / {{ stub_status; }} }}",
            folder = folder.display()
        );
        Self::start(pod, core, &folder, &config)
    }

    /// Starts a proxy beside the server, like a sidecar: it forwards the pod's requests over persistent connections.
    pub(crate) fn sidecar(
        pod: &NetnsFixture,
        core: usize,
        folder: &Path,
        h2: bool,
    ) -> Result<Self> {
        let folder = folder.join(format!("sidecar{}", pod.number));
        fs::create_dir_all(&folder)?;
        // nginx speaks no HTTP/2 to servers: behind the proxy it is HTTP/1.1, to a port that is not counted.
        // Idle connections to the server close after a second, because a measurement begins and ends without any.
        let (listens, to) = if h2 { (" http2", OTHER_PORT) } else { ("", SERVING_PORT) };
        let config = format!(
            "upstream app {{
                server 127.0.0.1:{to}; keepalive 256; keepalive_requests 1000000000; keepalive_timeout 1s;
            }}
            server {{
                listen {PROXY_PORT}{listens};
                location / {{
                    proxy_pass http://app; proxy_http_version 1.1; proxy_set_header Connection '';
                    proxy_buffers 8 64k; proxy_max_temp_file_size 0;
                }}
            }}"
        );
        Self::start(pod, core, &folder, &config)
    }

    fn start(pod: &NetnsFixture, core: usize, folder: &Path, servers: &str) -> Result<Self> {
        let config = format!(
            "daemon off; master_process off; pid {at}/pid; error_log stderr crit;
            events {{ worker_connections 1024; }}
            http {{
                access_log off; sendfile on; tcp_nopush on; open_file_cache max=8;
                keepalive_requests 1000000000; keepalive_timeout 600;
                {servers}
            }}",
            at = folder.display()
        );
        let file = folder.join("conf");
        fs::write(&file, config)?;
        let mut nginx = netns_command(pod, core);
        let child = nginx.arg("nginx").arg("-c").arg(&file).spawn().context("cannot start sh")?;
        let mut nginx = Self { child, netns: pod.netns.clone(), status_requests: Cell::new(0) };
        let until = Instant::now() + WAIT_TIMEOUT;
        // nginx writes its process id once its listeners are open.
        while !folder.join("pid").exists() {
            let ended = nginx.child.try_wait()?;
            ensure!(ended.is_none(), "nginx ended with {ended:?}");
            ensure!(Instant::now() < until, "nginx does not start");
            sleep();
        }
        Ok(nginx)
    }

    /// Returns the server's counts, without this function's own requests and connection.
    fn status(&self) -> Result<NginxStatus> {
        let page = get_status_page(&self.netns)?;
        self.status_requests.set(self.status_requests.get() + 1);
        let numbers: Vec<u64> = page.split_whitespace().flat_map(str::parse).collect();
        // Open connections; accepted, handled, requests; reading, writing, waiting.
        let [open, _, _, requests, ..] = numbers[..] else {
            anyhow::bail!("nginx said `{page}`");
        };
        Ok(NginxStatus { requests: requests - self.status_requests.get(), open: open - 1 })
    }

    /// Waits until all clients have disconnected, and returns the server's counts.
    pub(crate) fn settled_status(&self) -> Result<NginxStatus> {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let served = self.status()?;
            if served.open == 0 {
                return Ok(served);
            }
            ensure!(Instant::now() < until, "connections stay open: {served:?}");
            sleep();
        }
    }
}

impl Drop for BenchNginx {
    fn drop(&mut self) {
        let _dead_already = self.child.kill();
        let _waited_already = self.child.wait();
    }
}

/// Reads the status page from inside the server's network namespace.
fn get_status_page(netns: &str) -> Result<String> {
    let path = Path::new("/run/netns").join(netns);
    let inside = thread::spawn(move || -> Result<String> {
        setns(fs::File::open(path)?, CloneFlags::CLONE_NEWNET)?;
        let mut stream = TcpStream::connect(("127.0.0.1", STATUS_PORT))?;
        stream.set_read_timeout(Some(WAIT_TIMEOUT))?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        let (_, body) = response.split_once("\r\n\r\n").context("a response has a head")?;
        Ok(body.to_owned())
    });
    inside.join().map_err(|_panic| anyhow::anyhow!("the status client panicked"))?
}

#[allow(clippy::disallowed_methods, reason = "no runtime here, and nginx reports no event")]
pub(crate) fn sleep() {
    thread::sleep(Duration::from_millis(10));
}
