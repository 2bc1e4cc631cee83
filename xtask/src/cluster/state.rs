//! Shell: the cluster's folders, and the mark that xtask made it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::{config::ProxyMode, plan::Process};

/// Everything that is on disk; one folder a cluster.
const BASE: &str = "/var/lib/rouse-cluster";
/// Namespaces that outlive their processes; one folder a cluster.
const RUN: &str = "/run/rouse-cluster";
/// Who made the cluster. Faults are refused without it.
pub(crate) const MAKER: &str = "cargo xtask cluster";

/// What a cluster is; kept in `cluster.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    made_by: String,
    pub(crate) kubernetes: String,
    pub(crate) nodes: u8,
    pub(crate) proxy: String,
    /// The API server's port, the same in its namespace and on the host's loopback.
    pub(crate) port: u16,
    /// Folder of programs that were not built here.
    #[serde(default)]
    pub(crate) assets: Option<PathBuf>,
}

impl Mark {
    pub(crate) fn new(kubernetes: String, nodes: u8, proxy: ProxyMode, port: u16) -> Self {
        let proxy = proxy.name().to_owned();
        Self { made_by: MAKER.to_owned(), kubernetes, nodes, proxy, port, assets: None }
    }

    pub(crate) fn with_assets(self, assets: Option<PathBuf>) -> Self {
        Self { assets, ..self }
    }

    pub(crate) fn with_nodes(self, nodes: u8) -> Self {
        Self { nodes, ..self }
    }
}

/// The folders of one cluster.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) name: String,
}

impl State {
    /// The cluster `name`, which need not exist.
    pub(crate) fn new(name: &str) -> Result<Self> {
        let is_plain = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
        if name.is_empty() || name.len() > 32 || !name.chars().all(|c| is_plain(c) || c == '-') {
            bail!("`{name}` is no name for a cluster: use up to 32 of a-z, 0-9 and -");
        }
        Ok(Self { name: name.to_owned() })
    }

    pub(crate) fn folder(&self) -> PathBuf {
        Path::new(BASE).join(&self.name)
    }

    pub(crate) fn run_folder(&self) -> PathBuf {
        Path::new(RUN).join(&self.name)
    }

    pub(crate) fn pki(&self) -> PathBuf {
        self.folder().join("pki")
    }

    pub(crate) fn node(&self, node: u8) -> PathBuf {
        self.folder().join(format!("node{node}"))
    }

    /// The kubeconfig for people and tests; good on the host and in the control plane's namespace.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.folder().join("kubeconfig")
    }

    /// The kubeconfig that is good on nodes.
    pub(crate) fn kubeconfig_inside(&self) -> PathBuf {
        self.folder().join("admin.kubeconfig")
    }

    pub(crate) fn log(&self, process: Process) -> PathBuf {
        self.folder().join("log").join(format!("{}.log", process.to_string().replace('/', "-")))
    }

    pub(crate) fn pid_file(&self, process: Process) -> PathBuf {
        self.folder().join("pid").join(process.to_string().replace('/', "-"))
    }

    /// The network namespace of a node, or of the control plane.
    pub(crate) fn netns(&self, node: Option<u8>) -> PathBuf {
        let name = node.map_or_else(|| "hub".to_owned(), |node| format!("node{node}"));
        self.run_folder().join("netns").join(name)
    }

    /// Name of the cluster's cgroup in every hierarchy.
    pub(crate) fn cgroup(&self) -> String {
        format!("rouse-cluster-{}", self.name)
    }

    /// What is known of the cluster; `None` when there is none of this name.
    pub(crate) fn mark(&self) -> Result<Option<Mark>> {
        let file = self.folder().join("cluster.json");
        let text = match fs::read_to_string(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.with_context(|| format!("cannot read {}", file.display()))?,
        };
        let mark: Mark = serde_json::from_str(&text).with_context(|| {
            format!("{} is damaged: run `cargo xtask cluster down`", file.display())
        })?;
        if mark.made_by != MAKER {
            bail!("{} was not made by {MAKER}", self.folder().display());
        }
        Ok(Some(mark))
    }

    /// Writes the mark, whole or not at all.
    pub(crate) fn set_mark(&self, mark: &Mark) -> Result<()> {
        let folder = self.folder();
        for name in ["log", "pid", "pki"] {
            fs::create_dir_all(folder.join(name))
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let aside = folder.join("cluster.json.new");
        fs::write(&aside, serde_json::to_string_pretty(mark)?)?;
        fs::rename(&aside, folder.join("cluster.json")).context("cannot write the cluster's mark")
    }

    /// Like [`State::mark`] where the cluster must exist.
    pub(crate) fn existing(&self) -> Result<Mark> {
        self.mark()?.with_context(|| {
            format!(
                "there is no cluster `{}` made by {MAKER}: run `cargo xtask cluster up`",
                self.name
            )
        })
    }

    /// Removes all folders, and those above that are empty then.
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
        // Fails where another cluster still lives, as it should.
        for folder in [BASE, RUN] {
            let _not_empty = fs::remove_dir(folder);
        }
        Ok(())
    }
}

/// Writes a configuration file and makes its folder.
pub(crate) fn write(file: &Path, text: &str) -> Result<()> {
    let folder = file.parent().context("a file has a folder")?;
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(file, text))
        .with_context(|| format!("cannot write {}", file.display()))
}
