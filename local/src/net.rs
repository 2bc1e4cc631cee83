//! Shell: network namespaces of node, clients and pods, and the node's bridge, by rtnetlink.

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
use nix::sched::{CloneFlags, setns};
use rtnetlink::{Handle, LinkBridge, LinkUnspec, RouteMessageBuilder};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

mod new_namespace;
mod veth;

use self::new_namespace::{create_client_namespace, create_namespace, enable_own_tables};
use crate::addresses::PodAddress;
use crate::layout::{
    BRIDGE_NAME, CLUSTER_IPS_V4, CLUSTER_IPS_V6, DNS_ADDRESS, GATEWAY_V4, GATEWAY_V6,
    PODS_V4_PREFIX, PODS_V6_PREFIX,
};

/// Index of the loopback interface, the same in every namespace.
const LOOPBACK_INDEX: u32 = 1;
/// Index that is given to the bridge in the node and to `eth0` in namespaces of pods and clients.
const ETH0_INDEX: u32 = 2;
/// Hardware address of the bridge. It is fixed: otherwise it would change with each pod, and neighbours would have to
/// learn it again.
const BRIDGE_MAC: [u8; 6] = [0x02, 0x72, 0x6f, 0x75, 0x73, 0x65];
/// Pod networks kept ready, enough for one burst of a small service.
const READY_NETWORKS: usize = 4;

/// Failed step of setting up a network.
#[derive(Debug, Error)]
pub enum NetError {
    /// A namespace could not be made, entered or mounted.
    #[error("cannot {attempt} network namespace {subject}")]
    Namespace {
        /// Operation that failed, as a verb phrase.
        attempt: &'static str,
        /// Namespace, or thing in it, that it concerned.
        subject: String,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a netlink request.
    #[error("cannot {attempt} of {subject}")]
    Link {
        /// Operation that failed, as a verb phrase.
        attempt: &'static str,
        /// Interface, address or namespace that it concerned.
        subject: String,
        /// Error that the kernel returned.
        #[source]
        source: Box<rtnetlink::Error>,
    },
    /// The thread that makes namespaces is gone.
    #[error("the network thread has ended")]
    Ended,
}

/// Returns a closure that wraps an I/O error with the operation and its namespace.
fn namespace_error(
    attempt: &'static str,
    subject: impl ToString,
) -> impl FnOnce(io::Error) -> NetError {
    let subject = subject.to_string();
    move |source| NetError::Namespace { attempt, subject, source }
}

/// Returns a closure that wraps a netlink error with the operation and its subject.
fn link_error(
    attempt: &'static str,
    subject: impl ToString,
) -> impl FnOnce(rtnetlink::Error) -> NetError {
    let subject = subject.to_string();
    move |source| NetError::Link { attempt, subject, source: Box::new(source) }
}

/// Opens a network namespace by its mount point.
pub fn open_namespace(path: &Path) -> Result<OwnedFd, NetError> {
    File::open(path).map(OwnedFd::from).map_err(namespace_error("open", path.display()))
}

/// Opens the network namespace of the calling thread.
pub fn current_namespace() -> Result<OwnedFd, NetError> {
    open_namespace(Path::new("/proc/thread-self/ns/net"))
}

/// Moves the calling thread into a namespace. Threads that it starts later begin there.
pub fn enter_namespace(fd: BorrowedFd<'_>) -> Result<(), NetError> {
    setns(fd, CloneFlags::CLONE_NEWNET)
        .map_err(io::Error::from)
        .map_err(namespace_error("enter", "by its descriptor"))
}

/// Gives a namespace a name in the file system, by a bind mount.
pub fn publish(fd: BorrowedFd<'_>, path: &Path) -> Result<(), NetError> {
    let source = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    File::create(path).map_err(namespace_error("name", path.display()))?;
    mount(Some(&source), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(io::Error::from)
        .map_err(namespace_error("name", path.display()))
}

/// Removes the name of a namespace, which lives until its last process and descriptor are gone.
pub fn unpublish(path: &Path) {
    // Errors mean that it is not mounted or does not exist, and then nothing is to be done.
    let _ = umount2(path, MntFlags::MNT_DETACH);
    let _ = fs::remove_file(path);
}

/// Returns true if a namespace is mounted at `path`.
pub fn is_published(path: &Path) -> bool {
    nix::sys::statfs::statfs(path)
        .is_ok_and(|stat| stat.filesystem_type() == nix::sys::statfs::NSFS_MAGIC)
}

/// Runs `work` on a thread of its own, with a tokio runtime, inside namespace `fd`.
pub fn run_in_namespace<T: Send>(
    fd: BorrowedFd<'_>,
    work: impl AsyncFnOnce(Handle) -> Result<T, NetError> + Send,
) -> Result<T, NetError> {
    // A new thread, so that the caller never has to return from the namespace.
    let job = || {
        enter_namespace(fd)?;
        let runtime = thread_runtime()?;
        runtime.block_on(async {
            let handle = connect_netlink()?;
            work(handle).await
        })
    };
    thread::scope(|scope| scope.spawn(job).join()).unwrap_or(Err(NetError::Ended))
}

/// Returns a tokio runtime for the calling thread, which stays in the thread's namespace.
pub(crate) fn thread_runtime() -> Result<tokio::runtime::Runtime, NetError> {
    let built = tokio::runtime::Builder::new_current_thread().enable_all().build();
    built.map_err(namespace_error("start a runtime in", ""))
}

/// Opens a netlink connection in the calling thread's namespace.
fn connect_netlink() -> Result<Handle, NetError> {
    let (connection, handle, _) =
        rtnetlink::new_connection().map_err(namespace_error("connect to", ""))?;
    tokio::spawn(connection);
    Ok(handle)
}

/// Creates the node's and the clients' namespaces with bridge, addresses and routes; existing ones stay.
pub fn create_node_namespaces(node: &Path, client: &Path) -> Result<(), NetError> {
    let own_namespace = current_namespace()?;
    thread::scope(|scope| {
        let result = scope.spawn(|| -> Result<(), NetError> {
            let own_namespace = own_namespace.as_fd();
            if !is_published(node) {
                let fd = create_namespace(own_namespace)?;
                run_in_namespace(fd.as_fd(), set_up_node)?;
                // Published last: a namespace with a name is complete, also after a crash half-way.
                publish(fd.as_fd(), node)?;
            }
            let node = open_namespace(node)?;
            // Pods' namespaces are created from this one. An earlier version may have made it without the setting.
            enable_own_tables(node.as_fd(), own_namespace)?;
            if !is_published(client) {
                let fd = create_client_namespace(own_namespace)?;
                let addresses = crate::layout::CLIENT_ADDRESSES;
                run_in_namespace(node.as_fd(), async |handle| {
                    veth::connect_namespace(&handle, "client", fd.as_fd(), addresses).await
                })?;
                publish(fd.as_fd(), client)?;
            }
            Ok(())
        });
        result.join().unwrap_or(Err(NetError::Ended))
    })
}

/// Configures the node's namespace: DNS address, bridge, gateway addresses, and unreachable ClusterIPs.
async fn set_up_node(handle: Handle) -> Result<(), NetError> {
    // Without forwarding, the unreachable route would drop packets instead of answering with an error.
    let _ = fs::write("/proc/sys/net/ipv4/ip_forward", "1");
    let _ = fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1");
    bring_up(&handle, LOOPBACK_INDEX).await?;
    add_address(&handle, LOOPBACK_INDEX, DNS_ADDRESS.into(), 32).await?;
    let bridge = LinkBridge::new(BRIDGE_NAME)
        .index(ETH0_INDEX)
        .append_info_data(InfoBridge::ForwardDelay(0))
        .append_info_data(InfoBridge::MulticastSnooping(false))
        .address(BRIDGE_MAC.to_vec());
    handle
        .link()
        .add(bridge.build())
        .execute()
        .await
        .map_err(link_error("make the bridge", BRIDGE_NAME))?;
    add_address(&handle, ETH0_INDEX, GATEWAY_V4.into(), PODS_V4_PREFIX).await?;
    log_v6_error(add_address(&handle, ETH0_INDEX, GATEWAY_V6.into(), PODS_V6_PREFIX).await);
    // Connects to ClusterIPs of services are rewritten before they are routed. All others should fail at once.
    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(CLUSTER_IPS_V4.0, CLUSTER_IPS_V4.1)
        .kind(RouteType::Unreachable);
    let refuse = "refuse the ClusterIPs";
    handle.route().add(route.build()).execute().await.map_err(link_error(refuse, "the node"))?;
    let route = RouteMessageBuilder::<Ipv6Addr>::new()
        .destination_prefix(CLUSTER_IPS_V6.0, CLUSTER_IPS_V6.1)
        .kind(RouteType::Unreachable);
    log_v6_error(
        handle.route().add(route.build()).execute().await.map_err(link_error(refuse, "the node")),
    );
    Ok(())
}

/// Logs an IPv6 error: IPv6 may be off on this machine, and then the node works without it.
fn log_v6_error(result: Result<(), NetError>) {
    if let Err(error) = result {
        warn!(error = &error as &dyn std::error::Error, "ipv6 not set up");
    }
}

/// Brings up an interface.
async fn bring_up(handle: &Handle, index: u32) -> Result<(), NetError> {
    let message = LinkUnspec::new_with_index(index).up().build();
    handle
        .link()
        .change(message)
        .execute()
        .await
        .map_err(link_error("bring up the interface", index))
}

/// Adds an address to an interface.
async fn add_address(handle: &Handle, index: u32, ip: IpAddr, prefix: u8) -> Result<(), NetError> {
    let mut request = handle.address().add(index, ip, prefix);
    if ip.is_ipv6() {
        // All addresses on this bridge are ours: duplicate detection would only make the address unusable for a second.
        request.message_mut().attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    request.execute().await.map_err(link_error("set the address", ip))
}

/// A pod's network namespace, connected to the bridge.
#[derive(Debug)]
pub struct PodNetwork {
    /// Namespace, not published yet.
    pub namespace: OwnedFd,
    /// Addresses of its `eth0`.
    pub address: PodAddress,
}

/// Job for the thread of [`PodNetworkPool`].
enum NetworkJob {
    Acquire(oneshot::Sender<Result<PodNetwork, NetError>>),
    Release(PodAddress),
}

/// Handle of the thread that makes pods' namespaces ahead of need.
#[derive(Clone, Debug)]
pub struct PodNetworkPool {
    jobs: mpsc::Sender<NetworkJob>,
}

impl PodNetworkPool {
    /// Starts the thread in the calling thread's namespace, which must be the node's. `taken_addresses` are in use.
    pub fn start(taken_addresses: impl IntoIterator<Item = PodAddress>) -> Result<Self, NetError> {
        let (jobs, inbox) = mpsc::channel(256);
        let mut addresses = crate::addresses::PodAddressPool::default();
        taken_addresses.into_iter().for_each(|address| addresses.reserve(address));
        // Read here: the thread changes its namespace while it builds networks.
        let own_namespace = current_namespace()?;
        let serve = move || -> Result<(), NetError> {
            thread_runtime()?.block_on(async {
                let handle = connect_netlink()?;
                let ready = Vec::new();
                let builder = PodNetworkBuilder { handle, own_namespace, addresses, ready };
                builder.serve(inbox).await;
                Ok(())
            })
        };
        let thread = thread::Builder::new().name("networks".to_owned());
        thread.spawn(serve).map_err(namespace_error("start the thread of", "pods"))?;
        Ok(Self { jobs })
    }

    /// Returns a network for one pod, made ahead if one is ready.
    pub async fn acquire(&self) -> Result<PodNetwork, NetError> {
        let (reply_tx, reply_rx) = oneshot::channel();
        // If the thread is gone, the reply channel closes, and the next line reports it.
        let _ = self.jobs.send(NetworkJob::Acquire(reply_tx)).await;
        reply_rx.await.unwrap_or(Err(NetError::Ended))
    }

    /// Releases an address; its namespace must be unpublished.
    pub async fn release(&self, address: PodAddress) {
        let _ = self.jobs.send(NetworkJob::Release(address)).await;
    }
}

/// State of the thread that makes pod networks.
struct PodNetworkBuilder {
    handle: Handle,
    /// Namespace of the node, in which the thread stays.
    own_namespace: OwnedFd,
    addresses: crate::addresses::PodAddressPool,
    ready: Vec<PodNetwork>,
}

impl PodNetworkBuilder {
    /// Serves jobs. While none waits, it makes ready networks, up to [`READY_NETWORKS`].
    async fn serve(mut self, mut inbox: mpsc::Receiver<NetworkJob>) {
        loop {
            let job = match inbox.try_recv() {
                Ok(job) => job,
                // Pods that wait come first; networks are made ahead only while no job waits.
                Err(mpsc::error::TryRecvError::Empty) if self.ready.len() < READY_NETWORKS => {
                    match self.build_network().await {
                        Ok(network) => self.ready.push(network),
                        Err(error) => {
                            warn!(
                                error = &error as &dyn std::error::Error,
                                "no network made ahead"
                            );
                            // A pause, so that a lasting error does not fill log and processor.
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
                NetworkJob::Release(address) => {
                    // Neighbour entries first: the address may be given out again as soon as it is released.
                    veth::remove_neighbours(&self.handle, (address.v4(), address.v6())).await;
                    self.addresses.release(address);
                }
                NetworkJob::Acquire(reply) => {
                    let network = match self.ready.pop() {
                        Some(network) => Ok(network),
                        None => self.build_network().await,
                    };
                    let _ = reply.send(network);
                }
            }
        }
    }

    /// Allocates an address and makes a network with it.
    async fn build_network(&mut self) -> Result<PodNetwork, NetError> {
        let exhausted_error = || io::Error::other("all pod addresses are in use");
        let address = self
            .addresses
            .allocate()
            .ok_or_else(exhausted_error)
            .map_err(namespace_error("number", "a pod"))?;
        let network = self.connect_network(address).await;
        if network.is_err() {
            self.addresses.release(address);
        }
        network
    }

    /// Makes a namespace and connects it to the bridge.
    async fn connect_network(&self, address: PodAddress) -> Result<PodNetwork, NetError> {
        let namespace = create_namespace(self.own_namespace.as_fd())?;
        let name = format!("pod{}", address.host_number());
        let addresses = (address.v4(), address.v6());
        veth::connect_namespace(&self.handle, &name, namespace.as_fd(), addresses).await?;
        Ok(PodNetwork { namespace, address })
    }
}
