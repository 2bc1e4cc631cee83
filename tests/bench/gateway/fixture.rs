//! Shell: the pods of the bench, and the proxies before them.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use common::fixtures::TestAuthority;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::{
    cases::{ASLEEP_HOST, AWAKE_HOST, GRPC_HOST, GatewayPort, GatewaySubject},
    cores::BenchCores,
    played_controller::{PlayedController, bench_routes},
    pods::{self, GRPC_MESSAGE},
    process::BenchProcess,
    proxy_configs::{self, POD_ADDRESS, ProxyFiles},
};

/// Size of the response of `/bulk`, in bytes.
const BULK_BYTES: usize = 1 << 20;
/// Port of an activator's health and metrics.
const ADMIN_PORT: u16 = 7103;
/// Requests that may wait for a pod: more than any case sends.
const MAX_WAITING: &str = "20000";
/// Client connections of an activator. Its default follows from the limit of open files, and may be below a crowd.
const MAX_CONNECTIONS: &str = "12000";

/// Programs that the bench starts, beside nginx and HAProxy from the `PATH`.
#[derive(Clone, Debug)]
pub(crate) struct BenchPrograms {
    /// Executable `rouse` to measure.
    pub(crate) rouse: PathBuf,
    /// Executable `rouse` of an earlier commit, if there is one to compare with.
    pub(crate) old: Option<PathBuf>,
    /// Executable of Envoy.
    pub(crate) envoy: PathBuf,
    /// Executable of `tests/bench/gateway/go`.
    pub(crate) go_proxy: PathBuf,
}

/// A running proxy at an address of its own. Dropping it ends its process.
#[derive(Debug)]
pub(crate) struct GatewayProcess {
    pub(crate) address: Ipv4Addr,
    pub(crate) process: BenchProcess,
    /// Controller of an activator; `None` for other proxies.
    pub(crate) controller: Option<PlayedController>,
}

/// Pods, runtime and files of all cases.
#[derive(Debug)]
pub(crate) struct GatewayFixture {
    pub(crate) runtime: Runtime,
    pub(crate) cores: BenchCores,
    programs: BenchPrograms,
    /// Proxies that stay for all cases but those of memory.
    kept: RefCell<BTreeMap<GatewaySubject, GatewayProcess>>,
    next_number: Cell<u8>,
    _pod: BenchProcess,
    /// Last field, so that it is removed when all processes have ended.
    folder: TempDir,
}

impl GatewayFixture {
    /// Starts the pods. It must be called on the main thread, in the network namespace of the bench.
    pub(crate) fn start(cores: BenchCores, programs: BenchPrograms) -> Result<Self> {
        // Its threads inherit the core of this one.
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).enable_all().build().context("no runtime")?;
        let folder = tempfile::tempdir().context("cannot make a folder")?;
        write_certificate(folder.path())?;
        fs::write(folder.path().join("grpc"), GRPC_MESSAGE)?;
        let pod = start_nginx_pod(cores, folder.path())?;
        {
            let _inside = runtime.enter();
            pods::start_grpc_pod(GatewayPort::Grpc.at(POD_ADDRESS))?;
        }
        Ok(Self {
            runtime,
            cores,
            programs,
            kept: RefCell::default(),
            next_number: Cell::new(1),
            _pod: pod,
            folder,
        })
    }

    /// Returns true if an earlier program is a subject.
    pub(crate) const fn has_old(&self) -> bool {
        self.programs.old.is_some()
    }

    /// File with a message of gRPC.
    pub(crate) fn grpc_message(&self) -> PathBuf {
        self.folder.path().join("grpc")
    }

    /// Address of a subject that stays for all cases. It is started at the first call.
    pub(crate) fn kept_address(&self, subject: GatewaySubject) -> Result<Ipv4Addr> {
        if subject == GatewaySubject::Direct {
            return Ok(POD_ADDRESS);
        }
        if let Some(proxy) = self.kept.borrow().get(&subject) {
            return Ok(proxy.address);
        }
        let proxy = self.start_proxy(subject)?;
        let address = proxy.address;
        self.kept.borrow_mut().insert(subject, proxy);
        Ok(address)
    }

    /// Ends the subjects that stay, for cases that start processes of their own.
    pub(crate) fn end_kept(&self) {
        self.kept.borrow_mut().clear();
    }

    /// Ends a subject that stays, so that the next case starts it again.
    pub(crate) fn end_kept_of(&self, subject: GatewaySubject) {
        self.kept.borrow_mut().remove(&subject);
    }

    /// Starts a new process of a proxy, at an address that no other has had.
    pub(crate) fn start_proxy(&self, subject: GatewaySubject) -> Result<GatewayProcess> {
        let number = self.next_number.get();
        let next = number.checked_add(1).context("the bench has started too many processes")?;
        self.next_number.set(next);
        let address = Ipv4Addr::new(127, 0, 1, number);
        let name = format!("{}-{number}", subject.name());
        let folder = self.folder.path().join(&name);
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let controller = subject.is_activator().then(|| {
            let _inside = self.runtime.enter();
            PlayedController::start(&folder)
        });
        if let Some(controller) = &controller {
            controller.set(bench_routes());
        }
        let command = self.proxy_command(subject, address, &folder, controller.as_ref())?;
        let mut process = BenchProcess::start(&name, self.cores.proxy, &folder, &command)?;
        // Over TLS a connection is only half of a handshake, which nothing here minds.
        let all = [GatewayPort::H1, GatewayPort::H2c, GatewayPort::Tls, GatewayPort::Grpc];
        process.wait_until_listening(&all.map(|port| port.at(address)))?;
        let proxy = GatewayProcess { address, process, controller };
        if let Some(controller) = &proxy.controller {
            self.runtime.block_on(controller.wait_in_force())?;
        }
        Ok(proxy)
    }

    /// Program and arguments of a proxy, whose configuration is written to `folder`.
    fn proxy_command(
        &self,
        subject: GatewaySubject,
        address: Ipv4Addr,
        folder: &Path,
        controller: Option<&PlayedController>,
    ) -> Result<Vec<String>> {
        let certificates = CertificatePaths::new(self.folder.path());
        let files = certificates.files(folder);
        let config = folder.join("config.yaml");
        let write = |text: String| {
            fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))
        };
        let config_path = config.display().to_string();
        Ok(match subject {
            GatewaySubject::Direct => bail!("the pod needs no proxy"),
            GatewaySubject::Rouse => {
                activator_command(&self.programs.rouse, address, &files, controller)?
            }
            GatewaySubject::Old => {
                let program = self.programs.old.as_ref().context("no earlier program was given")?;
                activator_command(program, address, &files, controller)?
            }
            GatewaySubject::Nginx => {
                write(proxy_configs::nginx_proxy(address, &files))?;
                words(&["nginx", "-c", &config_path])
            }
            GatewaySubject::Haproxy => {
                write(proxy_configs::haproxy(address, &files))?;
                words(&["haproxy", "-db", "-f", &config_path])
            }
            GatewaySubject::Envoy => {
                write(proxy_configs::envoy(address, &files))?;
                let program = self.programs.envoy.display().to_string();
                let args = ["-c", &config_path, "--concurrency", "1", "--disable-hot-restart"];
                let quiet = ["--log-level", "error"];
                words(&[&[program.as_str()][..], &args, &quiet].concat())
            }
            GatewaySubject::Go => {
                let program = self.programs.go_proxy.display().to_string();
                let (certificate, key) =
                    (files.certificate.display().to_string(), files.key.display().to_string());
                let listen = address.to_string();
                let args = ["-address", &listen, "-certificate", &certificate, "-key", &key];
                words(&[&[program.as_str()][..], &args].concat())
            }
        })
    }
}

/// Files with the certificate of all TLS listeners.
#[derive(Debug)]
struct CertificatePaths {
    certificate: PathBuf,
    key: PathBuf,
    both: PathBuf,
}

impl CertificatePaths {
    fn new(folder: &Path) -> Self {
        let [certificate, key, both] = ["tls.crt", "tls.key", "tls.pem"].map(|it| folder.join(it));
        Self { certificate, key, both }
    }

    fn files<'a>(&'a self, folder: &'a Path) -> ProxyFiles<'a> {
        ProxyFiles {
            folder,
            certificate: &self.certificate,
            key: &self.key,
            certificate_and_key: &self.both,
        }
    }
}

/// Writes a certificate of all hosts, with an ECDSA P-256 key.
fn write_certificate(folder: &Path) -> Result<()> {
    let paths = CertificatePaths::new(folder);
    let issued = TestAuthority::new().issue(&[AWAKE_HOST, GRPC_HOST, ASLEEP_HOST]);
    fs::write(&paths.certificate, &issued.chain_pem).context("cannot write the certificate")?;
    fs::write(&paths.key, &issued.key_pem).context("cannot write the key")?;
    let both = format!("{}{}", issued.chain_pem, issued.key_pem);
    fs::write(&paths.both, both).context("cannot write the certificate")
}

/// Starts nginx as the pod, on the core of the clients.
fn start_nginx_pod(cores: BenchCores, folder: &Path) -> Result<BenchProcess> {
    let certificates = CertificatePaths::new(folder);
    let pod_folder = folder.join("pod");
    fs::create_dir(&pod_folder).context("cannot make the pod's folder")?;
    fs::write(pod_folder.join("bulk"), vec![b'x'; BULK_BYTES])?;
    let config = pod_folder.join("config");
    fs::write(&config, proxy_configs::nginx_pod(&certificates.files(&pod_folder)))?;
    let command = ["nginx", "-c", &config.display().to_string()].map(str::to_owned);
    let mut pod = BenchProcess::start("pod", cores.client, &pod_folder, &command)?;
    let ports = [GatewayPort::H1, GatewayPort::H2c, GatewayPort::Tls];
    pod.wait_until_listening(&ports.map(|port| port.at(POD_ADDRESS)))?;
    Ok(pod)
}

/// Program and arguments of an activator, with gateways for all protocols.
fn activator_command(
    program: &Path,
    address: Ipv4Addr,
    files: &ProxyFiles<'_>,
    controller: Option<&PlayedController>,
) -> Result<Vec<String>> {
    let [controller, autoscaler] =
        &controller.context("an activator needs a controller")?.endpoints;
    let at = |port: u16| format!("{address}:{port}");
    let port = |port: GatewayPort| port.number().to_string();
    let mut command = vec![program.display().to_string(), "activator".to_owned()];
    let options = [
        ("--name", "bench".to_owned()),
        ("--controller", controller.clone()),
        ("--autoscaler", autoscaler.clone()),
        ("--listen", address.to_string()),
        // Each of these gateways accepts HTTP/1.1 and HTTP/2.
        ("--outside", at(GatewayPort::H1.number())),
        ("--outside-port", port(GatewayPort::H2c)),
        ("--inside-port", port(GatewayPort::Grpc)),
        ("--outside-tls", at(GatewayPort::Tls.number())),
        ("--tls-cert", files.certificate.display().to_string()),
        ("--tls-key", files.key.display().to_string()),
        ("--admin", at(ADMIN_PORT)),
        ("--max-waiting", MAX_WAITING.to_owned()),
        ("--max-connections", MAX_CONNECTIONS.to_owned()),
    ];
    command.extend(options.into_iter().flat_map(|(name, value)| [name.to_owned(), value]));
    Ok(command)
}

impl GatewayProcess {
    /// Controller of the activator.
    pub(crate) fn activator_controller(&self) -> Result<&PlayedController> {
        self.controller.as_ref().context("only an activator has a controller")
    }

    /// Address of the port without TLS.
    pub(crate) fn h1_address(&self) -> SocketAddr {
        GatewayPort::H1.at(self.address)
    }
}

/// Copies the words of a command.
fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}
