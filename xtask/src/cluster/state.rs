//! Shell: directories of a cluster, and the record that xtask created it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::{config::KubeProxyMode, plan::ClusterProcess, process::ProcessIdentity};

/// Directory of all files, with a subdirectory for each cluster.
const BASE_DIRECTORY: &str = "/var/lib/rouse-cluster";
/// Directory of mounted namespaces, which outlive their processes, with a subdirectory for each cluster.
const RUN_DIRECTORY: &str = "/run/rouse-cluster";
/// Creator that a cluster's record names. Commands other than `down` refuse a cluster whose record names another one.
pub(crate) const CREATOR: &str = "cargo xtask cluster";

/// Record of a cluster's properties, stored in `cluster.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClusterRecord {
    made_by: String,
    pub(crate) kubernetes: String,
    pub(crate) nodes: u8,
    pub(crate) proxy: String,
    /// Port of the API server, the same in its namespace and on the host's loopback.
    pub(crate) port: u16,
    /// Directory of supplied programs; `None` if all were built here.
    #[serde(default)]
    pub(crate) assets: Option<PathBuf>,
    /// Test run that the cluster belongs to; `None` if it stays until `down`.
    #[serde(default)]
    pub(crate) owner: Option<ProcessIdentity>,
}

impl ClusterRecord {
    pub(crate) fn new(kubernetes: String, nodes: u8, proxy: KubeProxyMode, port: u16) -> Self {
        let proxy = proxy.name().to_owned();
        let made_by = CREATOR.to_owned();
        Self { made_by, kubernetes, nodes, proxy, port, assets: None, owner: None }
    }

    pub(crate) fn with_owner(self, owner: Option<ProcessIdentity>) -> Self {
        Self { owner, ..self }
    }

    pub(crate) fn with_assets(self, assets: Option<PathBuf>) -> Self {
        Self { assets, ..self }
    }

    pub(crate) fn with_nodes(self, nodes: u8) -> Self {
        Self { nodes, ..self }
    }
}

/// Directories and file names of one cluster.
#[derive(Clone, Debug)]
pub(crate) struct ClusterPaths {
    pub(crate) name: String,
}

impl ClusterPaths {
    /// Paths of the cluster `name`, which need not exist.
    pub(crate) fn new(name: &str) -> Result<Self> {
        let is_plain = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
        if name.is_empty() || name.len() > 32 || !name.chars().all(|c| is_plain(c) || c == '-') {
            bail!("`{name}` is no name for a cluster: use up to 32 of a-z, 0-9 and -");
        }
        Ok(Self { name: name.to_owned() })
    }

    /// Paths of every cluster on this machine that has a directory.
    pub(crate) fn all() -> Vec<Self> {
        let folders = fs::read_dir(BASE_DIRECTORY).into_iter().flatten().flatten();
        let names = folders.filter_map(|folder| folder.file_name().into_string().ok());
        names.filter_map(|name| Self::new(&name).ok()).collect()
    }

    pub(crate) fn folder(&self) -> PathBuf {
        Path::new(BASE_DIRECTORY).join(&self.name)
    }

    pub(crate) fn run_folder(&self) -> PathBuf {
        Path::new(RUN_DIRECTORY).join(&self.name)
    }

    pub(crate) fn pki(&self) -> PathBuf {
        self.folder().join("pki")
    }

    pub(crate) fn node(&self, node: u8) -> PathBuf {
        self.folder().join(format!("node{node}"))
    }

    /// Path of the kubeconfig for users and tests, valid on the host and in the control plane's namespace.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.folder().join("kubeconfig")
    }

    /// Path of the kubeconfig that is valid on nodes.
    pub(crate) fn kubeconfig_inside(&self) -> PathBuf {
        self.folder().join("admin.kubeconfig")
    }

    pub(crate) fn log(&self, process: ClusterProcess) -> PathBuf {
        self.folder().join("log").join(format!("{}.log", process.to_string().replace('/', "-")))
    }

    pub(crate) fn pid_file(&self, process: ClusterProcess) -> PathBuf {
        self.folder().join("pid").join(process.to_string().replace('/', "-"))
    }

    /// Path of the network namespace of a node, or of the control plane (`None`).
    pub(crate) fn netns(&self, node: Option<u8>) -> PathBuf {
        let name = node.map_or_else(|| "hub".to_owned(), |node| format!("node{node}"));
        self.run_folder().join("netns").join(name)
    }

    /// Name of the cluster's cgroup in every hierarchy.
    pub(crate) fn cgroup(&self) -> String {
        format!("rouse-cluster-{}", self.name)
    }

    /// Reads the cluster's record; `None` if there is no cluster of this name.
    pub(crate) fn read_record(&self) -> Result<Option<ClusterRecord>> {
        let file = self.folder().join("cluster.json");
        let text = match fs::read_to_string(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.with_context(|| format!("cannot read {}", file.display()))?,
        };
        let record: ClusterRecord = serde_json::from_str(&text).with_context(|| {
            format!("{} is damaged: run `cargo xtask cluster down`", file.display())
        })?;
        if record.made_by != CREATOR {
            bail!("{} was not made by {CREATOR}", self.folder().display());
        }
        Ok(Some(record))
    }

    /// Writes the record, atomically by a rename.
    pub(crate) fn write_record(&self, record: &ClusterRecord) -> Result<()> {
        let folder = self.folder();
        for name in ["log", "pid", "pki"] {
            fs::create_dir_all(folder.join(name))
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        // A record is complete or absent, because `down` trusts its content.
        let temporary = folder.join("cluster.json.new");
        fs::write(&temporary, serde_json::to_string_pretty(record)?)?;
        fs::rename(&temporary, folder.join("cluster.json"))
            .context("cannot write the cluster's record")
    }

    /// Reads the record of a cluster that must exist.
    pub(crate) fn require_record(&self) -> Result<ClusterRecord> {
        self.read_record()?.with_context(|| {
            format!(
                "there is no cluster `{}` made by {CREATOR}: run `cargo xtask cluster up`",
                self.name
            )
        })
    }

    /// Removes all directories of the cluster, and then empty ones above them.
    pub(crate) fn remove(&self) -> Result<()> {
        for folder in [self.folder(), self.run_folder()] {
            match fs::remove_dir_all(&folder) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error)
                        .with_context(|| format!("cannot remove {}", folder.display()));
                }
                Ok(()) | Err(_) => {}
            }
        }
        // Fails while another cluster exists, which then keeps the directory.
        for folder in [BASE_DIRECTORY, RUN_DIRECTORY] {
            let _not_empty = fs::remove_dir(folder);
        }
        Ok(())
    }
}

/// Writes a configuration file and creates its directory.
pub(crate) fn write_file(file: &Path, text: &str) -> Result<()> {
    let folder = file.parent().context("a file has a folder")?;
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(file, text))
        .with_context(|| format!("cannot write {}", file.display()))
}
