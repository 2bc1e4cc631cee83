//! Shell: the bootstrap file on the node's disk: it is read once at start, and written when its content changes.

use std::{
    collections::BTreeSet,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use common::{
    link::error_chain,
    replicas::{KnownReplicas, ReplicaEndpoint},
};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    api_client::ApiServerClient,
    bootstrap::{BootstrapDocument, BootstrapFrontend, BootstrapServices},
};
use crate::config::BOOTSTRAP_EXTENSIONS;

/// Least time between two writes of the file.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which a failed write is tried again without a change.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// File with the id of this boot of the node.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Places to which the agent's loop passes the facts about the start of a node.
pub(crate) struct BootstrapPublisher {
    /// Client of the API servers; `None` if the agent watches no Services.
    api_servers: Option<ApiServerClient>,
    services: watch::Sender<Option<BootstrapServices>>,
}

impl BootstrapPublisher {
    /// Returns a publisher to this client, and the receiver of the file's task.
    pub(crate) fn new(
        api_servers: Option<ApiServerClient>,
    ) -> (Self, watch::Receiver<Option<BootstrapServices>>) {
        let (services, receiver) = watch::channel(None);
        (Self { api_servers, services }, receiver)
    }

    /// Passes on what the Services of the cluster tell.
    pub(crate) fn publish(&self, services: BootstrapServices) {
        if let Some(client) = &self.api_servers {
            client.set_learnt(&services.api_servers);
        }
        self.services.send_replace(Some(services));
    }
}

/// Sources of the file's content.
pub(crate) struct BootstrapSources {
    /// Facts of the Services of the cluster; `None` until they are known.
    pub(crate) services: watch::Receiver<Option<BootstrapServices>>,
    /// Controllers that the agent knows.
    pub(crate) controllers: watch::Receiver<KnownReplicas>,
    /// Autoscalers that the agent knows.
    pub(crate) autoscalers: watch::Receiver<KnownReplicas>,
}

impl BootstrapSources {
    /// Puts what the sources know in this boot into the document.
    fn update(&mut self, document: &mut BootstrapDocument, boot: Option<&str>) {
        if let Some(services) = &*self.services.borrow_and_update() {
            document.set_services(services);
            document.set_boot(boot);
        }
        document.set_controllers(addresses(&self.controllers.borrow_and_update()));
        document.set_autoscalers(addresses(&self.autoscalers.borrow_and_update()));
    }

    /// Waits for a change. Fails once a source has ended, as at shutdown.
    async fn changed(&mut self) -> Result<(), watch::error::RecvError> {
        tokio::select! {
            changed = self.services.changed() => changed,
            changed = self.controllers.changed() => changed,
            changed = self.autoscalers.changed() => changed,
        }
    }
}

fn addresses(known: &KnownReplicas) -> BTreeSet<SocketAddr> {
    let address = |replica| match replica {
        ReplicaEndpoint::Tcp { address, .. } => Some(address),
        ReplicaEndpoint::Unix(_) => None,
    };
    known.all().into_iter().filter_map(address).collect()
}

/// Bootstrap file of this node.
#[derive(Debug)]
pub(crate) struct BootstrapFile {
    path: PathBuf,
    /// Id of this boot; `None`: it cannot be read.
    boot: Option<String>,
    /// Content that the file should have.
    document: BootstrapDocument,
    /// Content that it has; without a usable file, that of nothing known.
    written: BootstrapDocument,
    /// True if the file on disk cannot be used. It is kept under another name.
    is_foreign: bool,
    /// Error of the last write, so that a lasting one is logged once.
    failure: Option<String>,
}

impl BootstrapFile {
    /// Reads the file of `node`. A file that cannot be used is logged and ignored.
    pub(crate) fn open(path: PathBuf, node: &str) -> Self {
        let read = read(&path, node);
        if let Err(reason) = &read {
            let path = path.display();
            warn!(%path, reason, "bootstrap file is ignored; the next write keeps it as *.ignored");
        }
        let is_foreign = read.is_err();
        let document = read.ok().flatten().unwrap_or_else(|| BootstrapDocument::new(node));
        let (boot, written) = (read_boot_id(), document.clone());
        Self { path, boot, document, written, is_foreign, failure: None }
    }

    /// Returns the content as it was read; without a usable file, nothing is known.
    pub(crate) fn document(&self) -> &BootstrapDocument {
        &self.document
    }

    /// Returns the lists that fill empty maps at this start.
    pub(crate) fn start_lists(&self) -> Vec<BootstrapFrontend> {
        self.document.lists_for_boot(self.boot.as_deref()).to_vec()
    }

    /// Writes each change of the sources until `shutdown`, and the last one then.
    pub(crate) async fn keep(mut self, mut sources: BootstrapSources, shutdown: CancellationToken) {
        let mut has_ended = false;
        loop {
            sources.update(&mut self.document, self.boot.as_deref());
            self.write_if_changed().await;
            if has_ended {
                return;
            }
            has_ended = tokio::select! {
                has_ended = Self::wait(&mut sources, self.failure.is_some()) => has_ended,
                () = shutdown.cancelled() => true,
            };
        }
    }

    /// Waits for the next write. Returns true if a source has ended.
    async fn wait(sources: &mut BootstrapSources, has_failed: bool) -> bool {
        // A rollout of DNS or of controllers changes one pod after the other.
        sleep(WRITE_INTERVAL).await;
        if !has_failed {
            return sources.changed().await.is_err();
        }
        timeout(RETRY_INTERVAL, sources.changed()).await.is_ok_and(|changed| changed.is_err())
    }

    /// Writes the file if its content has changed. A failed write is tried again later, and logged once.
    async fn write_if_changed(&mut self) {
        if self.written == self.document {
            return;
        }
        let (path, text, keeps_present) =
            (self.path.clone(), self.document.to_text(), self.is_foreign);
        // The disk of a node may take long.
        let write = move || write_file(&path, &text, keeps_present);
        let written = tokio::task::spawn_blocking(write).await;
        match written.unwrap_or_else(|panic| Err(io::Error::other(panic))) {
            Ok(()) => {
                info!(path = %self.path.display(), "bootstrap file written");
                self.written.clone_from(&self.document);
                (self.is_foreign, self.failure) = (false, None);
            }
            Err(error) => {
                let failure = error_chain(&error);
                if self.failure.as_ref() != Some(&failure) {
                    warn!(path = %self.path.display(), failure, "cannot write the bootstrap file");
                }
                self.failure = Some(failure);
            }
        }
    }
}

/// Returns the id of this boot of the node; `None` if it cannot be read.
fn read_boot_id() -> Option<String> {
    fs::read_to_string(BOOT_ID).ok().map(|text| text.trim().to_owned())
}

/// Reads a bootstrap file; `None` if there is none. The error is the reason that it is of no use.
fn read(path: &Path, node: &str) -> Result<Option<BootstrapDocument>, String> {
    match fs::read_to_string(path) {
        Ok(text) => match BootstrapDocument::parse(&text, node) {
            Ok(document) => Ok(Some(document)),
            Err(error) => Err(error_chain(&error)),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("it cannot be read: {error}")),
    }
}

/// Replaces a file as a whole: after a crash of the node it has the old content or the new one.
fn write_file(path: &Path, text: &str, keeps_present: bool) -> io::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let [draft, ignored] = BOOTSTRAP_EXTENSIONS.map(|it| path.with_extension(it));
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    if keeps_present {
        match fs::rename(path, ignored) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    fs::rename(&draft, path)?;
    // The new name is on disk once the folder is.
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use common::replicas::EndpointSetting;

    use super::*;

    /// Folder of one test; removed on drop.
    struct TestFolder(PathBuf);

    impl TestFolder {
        fn new(test: &str) -> Self {
            let name = format!("rouse-bootstrap-{test}-{}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }

        fn open(&self, node: &str) -> BootstrapFile {
            BootstrapFile::open(self.0.join(format!("{node}.json")), node)
        }

        fn text(&self, name: &str) -> Option<String> {
            fs::read_to_string(self.0.join(name)).ok()
        }
    }

    impl Drop for TestFolder {
        fn drop(&mut self) {
            let _missing = fs::remove_dir_all(&self.0);
        }
    }

    fn at(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 7100))
    }

    fn services(endpoint: u8) -> BootstrapServices {
        let frontend = BootstrapFrontend {
            namespace: "kube-system".into(),
            name: "kube-dns".into(),
            protocol: 6,
            address: at(10),
            affinity_seconds: 0,
            endpoints: [at(endpoint)].into(),
        };
        BootstrapServices { api_servers: [at(1)].into(), frontends: vec![frontend] }
    }

    fn replicas(addresses: &[SocketAddr]) -> KnownReplicas {
        let mut known = KnownReplicas::new(&EndpointSetting::Dns { name: "a".into(), port: 1 });
        let endpoint = |&address: &SocketAddr| ReplicaEndpoint::Tcp { address, tls: true };
        known.set_resolved(addresses.iter().map(endpoint));
        known
    }

    /// Keeps the file while the sources tell this, until shutdown.
    async fn keep(folder: &TestFolder, services: Option<BootstrapServices>, controllers: &[u8]) {
        let (publisher, receiver) = BootstrapPublisher::new(None);
        let controllers: Vec<_> = controllers.iter().copied().map(at).collect();
        let controllers = watch::Sender::new(replicas(&controllers));
        let autoscalers = watch::Sender::new(replicas(&[]));
        let sources = BootstrapSources {
            services: receiver,
            controllers: controllers.subscribe(),
            autoscalers: autoscalers.subscribe(),
        };
        let shutdown = CancellationToken::new();
        let file = folder.open("n1");
        let kept = tokio::spawn(file.keep(sources, shutdown.clone()));
        services.into_iter().for_each(|it| publisher.publish(it));
        shutdown.cancel();
        kept.await.expect("no panic");
    }

    #[tokio::test]
    async fn the_next_agent_reads_what_the_last_one_knew() {
        let folder = TestFolder::new("kept");
        keep(&folder, None, &[]).await;
        assert_eq!(folder.text("n1.json"), None, "nothing is known");
        keep(&folder, Some(services(2)), &[3]).await;
        // Another agent knows nothing yet, or another controller only.
        keep(&folder, None, &[]).await;
        keep(&folder, None, &[4]).await;
        let mut expected = BootstrapDocument::new("n1");
        expected.set_services(&services(2));
        expected.set_boot(read_boot_id().as_deref());
        expected.set_controllers([at(4)].into());
        assert_eq!(folder.open("n1").document(), &expected);
        assert_eq!(folder.open("n1").start_lists(), [], "no reboot has emptied the maps");
        let other = folder.open("n2");
        assert_eq!(other.document(), &BootstrapDocument::new("n2"), "each node has a file");
        assert_eq!(folder.text("n1.json.new"), None, "no draft is left");
    }

    #[tokio::test]
    async fn a_file_of_no_use_is_ignored_and_not_lost() {
        let folder = TestFolder::new("foreign");
        fs::create_dir_all(&folder.0).expect("a folder");
        fs::write(folder.0.join("n1.json"), "{\"format\": \"other\"").expect("a file");
        keep(&folder, None, &[]).await;
        assert_eq!(folder.text("n1.json").as_deref(), Some("{\"format\": \"other\""));
        keep(&folder, Some(services(2)), &[]).await;
        assert_eq!(folder.text("n1.json.ignored").as_deref(), Some("{\"format\": \"other\""));
        let read = folder.open("n1");
        assert_eq!(read.document().frontends, services(2).frontends);
        keep(&folder, Some(services(3)), &[]).await;
        assert_eq!(folder.text("n1.json.ignored").as_deref(), Some("{\"format\": \"other\""));
    }

    #[tokio::test]
    async fn a_folder_that_cannot_be_made_is_no_reason_to_stop() {
        let folder = TestFolder::new("file");
        fs::write(&folder.0, "no folder").expect("a file");
        keep(&folder, Some(services(2)), &[3]).await;
        assert_eq!(fs::read_to_string(&folder.0).expect("the file"), "no folder");
        fs::remove_file(&folder.0).expect("the file");
    }
}
