//! Shell: rtnetlink: the node's bridge, the clients' namespace and the pods' namespaces.

use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;

use netlink_packet_route::address::{AddressAttribute, AddressFlags};
use netlink_packet_route::link::InfoBridge;
use netlink_packet_route::route::RouteType;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use rtnetlink::{Handle, LinkBridge, LinkUnspec, RouteMessageBuilder};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

mod cable;

use crate::addresses::PodAddress;
use crate::layout::{
    BRIDGE, CLUSTER_V4, CLUSTER_V6, DNS, GATEWAY_V4, GATEWAY_V6, PODS_V4_PREFIX, PODS_V6_PREFIX,
};

/// Index of the loopback interface in every namespace.
const LO: u32 = 1;
/// Index given to `eth0` in the namespaces made here.
const ETH0: u32 = 2;
/// Hardware address of the bridge. Fixed: otherwise it changes with each pod, and neighbours would have to learn it anew.
const BRIDGE_MAC: [u8; 6] = [0x02, 0x72, 0x6f, 0x75, 0x73, 0x65];
/// Namespaces kept ready: one burst of a small service finds its network made.
const READY: usize = 4;

/// A step of the network that failed.
#[derive(Debug, Error)]
pub enum NetError {
    /// A namespace could not be made, entered or mounted.
    #[error("cannot {attempt} network namespace {subject}")]
    Namespace {
        /// What was tried.
        attempt: &'static str,
        /// On which.
        subject: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a netlink request.
    #[error("cannot {attempt} of {subject}")]
    Link {
        /// What was tried.
        attempt: &'static str,
        /// On which.
        subject: String,
        /// Why.
        #[source]
        source: Box<rtnetlink::Error>,
    },
    /// The thread that makes namespaces is gone.
    #[error("the network thread has ended")]
    Ended,
}

fn namespace(attempt: &'static str, subject: impl ToString) -> impl FnOnce(io::Error) -> NetError {
    let subject = subject.to_string();
    move |source| NetError::Namespace { attempt, subject, source }
}

fn link(
    attempt: &'static str,
    subject: impl ToString,
) -> impl FnOnce(rtnetlink::Error) -> NetError {
    let subject = subject.to_string();
    move |source| NetError::Link { attempt, subject, source: Box::new(source) }
}

/// Opens a namespace by its mount point.
pub fn open(path: &Path) -> Result<OwnedFd, NetError> {
    File::open(path).map(OwnedFd::from).map_err(namespace("open", path.display()))
}

/// The network namespace of the calling thread.
pub fn current() -> Result<OwnedFd, NetError> {
    open(Path::new("/proc/thread-self/ns/net"))
}

/// Moves the calling thread into a namespace. Threads it starts later begin there.
pub fn enter(fd: BorrowedFd<'_>) -> Result<(), NetError> {
    setns(fd, CloneFlags::CLONE_NEWNET)
        .map_err(io::Error::from)
        .map_err(namespace("enter", "of the node"))
}

/// Makes a namespace; the calling thread stays where `home` is.
fn make(home: BorrowedFd<'_>) -> Result<OwnedFd, NetError> {
    let made =
        unshare(CloneFlags::CLONE_NEWNET).map_err(io::Error::from).map_err(namespace("make", ""));
    let made = made.and_then(|()| current());
    // As containerd: a process without privileges may serve on port 80.
    let _ = fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
    enter(home)?;
    made
}

/// Gives a namespace a name in the file system.
pub fn publish(fd: BorrowedFd<'_>, path: &Path) -> Result<(), NetError> {
    let source = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    File::create(path).map_err(namespace("name", path.display()))?;
    mount(Some(&source), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(io::Error::from)
        .map_err(namespace("name", path.display()))
}

/// Takes the name away again. The namespace lives until its last process and descriptor are gone.
pub fn unpublish(path: &Path) {
    // Not mounted or not there: nothing to take away.
    let _ = umount2(path, MntFlags::MNT_DETACH);
    let _ = fs::remove_file(path);
}

/// Whether a namespace is mounted there.
pub fn is_published(path: &Path) -> bool {
    nix::sys::statfs::statfs(path)
        .is_ok_and(|stat| stat.filesystem_type() == nix::sys::statfs::NSFS_MAGIC)
}

/// Runs `work` on a thread of its own, with a runtime, inside namespace `fd`.
pub fn within<T: Send>(
    fd: BorrowedFd<'_>,
    work: impl AsyncFnOnce(Handle) -> Result<T, NetError> + Send,
) -> Result<T, NetError> {
    let job = || {
        enter(fd)?;
        let runtime = runtime()?;
        runtime.block_on(async {
            let handle = connect()?;
            work(handle).await
        })
    };
    thread::scope(|scope| scope.spawn(job).join()).unwrap_or(Err(NetError::Ended))
}

pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, NetError> {
    let built = tokio::runtime::Builder::new_current_thread().enable_all().build();
    built.map_err(namespace("start a runtime in", ""))
}

/// A netlink connection in the calling thread's namespace.
fn connect() -> Result<Handle, NetError> {
    let (connection, handle, _) =
        rtnetlink::new_connection().map_err(namespace("connect to", ""))?;
    tokio::spawn(connection);
    Ok(handle)
}

/// Makes the node's and the clients' namespaces with bridge, addresses and routes. What is there already stays.
pub fn create_node(node: &Path, client: &Path) -> Result<(), NetError> {
    let home = current()?;
    thread::scope(|scope| {
        let made = scope.spawn(|| -> Result<(), NetError> {
            if !is_published(node) {
                let fd = make(home.as_fd())?;
                within(fd.as_fd(), set_up_node)?;
                publish(fd.as_fd(), node)?;
            }
            if !is_published(client) {
                let fd = make(home.as_fd())?;
                let addresses = crate::layout::CLIENT;
                within(open(node)?.as_fd(), async |handle| {
                    cable::lay(&handle, "client", fd.as_fd(), addresses).await
                })?;
                publish(fd.as_fd(), client)?;
            }
            Ok(())
        });
        made.join().unwrap_or(Err(NetError::Ended))
    })
}

async fn set_up_node(handle: Handle) -> Result<(), NetError> {
    // Without forwarding an unreachable route would be silence, not an answer.
    let _ = fs::write("/proc/sys/net/ipv4/ip_forward", "1");
    let _ = fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1");
    up(&handle, LO).await?;
    add_address(&handle, LO, DNS.into(), 32).await?;
    let bridge = LinkBridge::new(BRIDGE)
        .index(ETH0)
        .append_info_data(InfoBridge::ForwardDelay(0))
        .append_info_data(InfoBridge::MulticastSnooping(false))
        .address(BRIDGE_MAC.to_vec());
    handle.link().add(bridge.build()).execute().await.map_err(link("make the bridge", BRIDGE))?;
    add_address(&handle, ETH0, GATEWAY_V4.into(), PODS_V4_PREFIX).await?;
    v6(add_address(&handle, ETH0, GATEWAY_V6.into(), PODS_V6_PREFIX).await);
    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(CLUSTER_V4.0, CLUSTER_V4.1)
        .kind(RouteType::Unreachable);
    let refuse = "refuse the ClusterIPs";
    handle.route().add(route.build()).execute().await.map_err(link(refuse, "the node"))?;
    let route = RouteMessageBuilder::<Ipv6Addr>::new()
        .destination_prefix(CLUSTER_V6.0, CLUSTER_V6.1)
        .kind(RouteType::Unreachable);
    v6(handle.route().add(route.build()).execute().await.map_err(link(refuse, "the node")));
    Ok(())
}

/// IPv6 may be off on this machine; then the node does without.
fn v6(result: Result<(), NetError>) {
    if let Err(error) = result {
        warn!(error = &error as &dyn std::error::Error, "ipv6 not set up");
    }
}

async fn up(handle: &Handle, index: u32) -> Result<(), NetError> {
    let message = LinkUnspec::new_with_index(index).up().build();
    handle.link().change(message).execute().await.map_err(link("bring up the interface", index))
}

async fn add_address(handle: &Handle, index: u32, ip: IpAddr, prefix: u8) -> Result<(), NetError> {
    let mut request = handle.address().add(index, ip, prefix);
    if ip.is_ipv6() {
        // Nobody else is on this bridge: duplicate detection would only keep the address unusable for a second.
        request.message_mut().attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    request.execute().await.map_err(link("set the address", ip))
}

/// A pod's network, made and connected.
#[derive(Debug)]
pub struct PodNetwork {
    /// Its namespace.
    pub namespace: OwnedFd,
    /// Its addresses.
    pub address: PodAddress,
}

enum Job {
    Take(oneshot::Sender<Result<PodNetwork, NetError>>),
    Release(PodAddress),
}

/// The thread that makes pods' namespaces ahead of need.
#[derive(Clone, Debug)]
pub struct Networks {
    jobs: mpsc::Sender<Job>,
}

impl Networks {
    /// Starts the thread in the calling thread's namespace, which must be the node's. `taken` are addresses in use.
    pub fn start(taken: impl IntoIterator<Item = PodAddress>) -> Result<Self, NetError> {
        let (jobs, inbox) = mpsc::channel(256);
        let mut addresses = crate::addresses::Addresses::default();
        taken.into_iter().for_each(|address| addresses.take(address));
        let home = current()?;
        let serve = move || -> Result<(), NetError> {
            runtime()?.block_on(async {
                let handle = connect()?;
                let maker = Maker { handle, home, addresses, ready: Vec::new() };
                maker.serve(inbox).await;
                Ok(())
            })
        };
        let thread = thread::Builder::new().name("networks".to_owned());
        thread.spawn(serve).map_err(namespace("start the thread of", "pods"))?;
        Ok(Self { jobs })
    }

    /// A network for one pod.
    pub async fn take(&self) -> Result<PodNetwork, NetError> {
        let (reply, answer) = oneshot::channel();
        // A closed channel shows in the answer.
        let _ = self.jobs.send(Job::Take(reply)).await;
        answer.await.unwrap_or(Err(NetError::Ended))
    }

    /// Gives an address back; its namespace must be unpublished.
    pub async fn release(&self, address: PodAddress) {
        let _ = self.jobs.send(Job::Release(address)).await;
    }
}

struct Maker {
    handle: Handle,
    home: OwnedFd,
    addresses: crate::addresses::Addresses,
    ready: Vec<PodNetwork>,
}

impl Maker {
    async fn serve(mut self, mut inbox: mpsc::Receiver<Job>) {
        loop {
            let job = match inbox.try_recv() {
                Ok(job) => job,
                // Orders come first; namespaces are made ahead only when none waits.
                Err(mpsc::error::TryRecvError::Empty) if self.ready.len() < READY => {
                    match self.build().await {
                        Ok(network) => self.ready.push(network),
                        Err(error) => {
                            warn!(
                                error = &error as &dyn std::error::Error,
                                "no network made ahead"
                            );
                            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                        }
                    }
                    continue;
                }
                Err(mpsc::error::TryRecvError::Empty) => match inbox.recv().await {
                    Some(job) => job,
                    None => return,
                },
                Err(mpsc::error::TryRecvError::Disconnected) => return,
            };
            match job {
                Job::Release(address) => {
                    cable::forget(&self.handle, (address.v4(), address.v6())).await;
                    self.addresses.release(address);
                }
                Job::Take(reply) => {
                    let network = match self.ready.pop() {
                        Some(network) => Ok(network),
                        None => self.build().await,
                    };
                    let _ = reply.send(network);
                }
            }
        }
    }

    async fn build(&mut self) -> Result<PodNetwork, NetError> {
        let full = || io::Error::other("all pod addresses are in use");
        let address =
            self.addresses.allot().ok_or_else(full).map_err(namespace("number", "a pod"))?;
        let made = self.cable(address).await;
        if made.is_err() {
            self.addresses.release(address);
        }
        made
    }

    async fn cable(&self, address: PodAddress) -> Result<PodNetwork, NetError> {
        let namespace = make(self.home.as_fd())?;
        let name = format!("pod{}", address.host());
        let addresses = (address.v4(), address.v6());
        cable::lay(&self.handle, &name, namespace.as_fd(), addresses).await?;
        Ok(PodNetwork { namespace, address })
    }
}
