//! Shell: builds test programs, all of them of the same choice of packages and with the same kernel half, so that Cargo
//! builds no crate twice for other features of it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, anyhow, bail};
use serde::{Deserialize, Serialize};

use crate::{build_ebpf, sh, workspace::Workspace};

/// How test programs are built in one run.
#[derive(Debug)]
pub(super) struct Builder {
    /// What they are built from.
    pub(super) workspace: Workspace,
    /// The kernel half, or why there is none.
    object: Result<PathBuf, String>,
    /// Test programs that another process has built; `None` where this one builds them.
    built: Option<Vec<Built>>,
}

/// A test program that cargo built.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Built {
    /// Name of the test, as `cargo test --test` takes it.
    name: String,
    /// Folder of its package.
    pub(super) folder: String,
    /// Its root source file.
    pub(super) source: String,
    pub(super) executable: String,
}

impl Builder {
    /// Without the kernel half, which needs its own compiler.
    pub(super) fn plain(workspace: Workspace) -> Self {
        Self { workspace, object: Err("nothing that runs needs it".to_owned()), built: None }
    }

    /// With the kernel half, which is built here, once `prepared` says that it can be. Where it cannot, only what needs it fails.
    pub(super) fn with_kernel_half(workspace: Workspace, prepared: Result<()>) -> Self {
        let object = prepared.and_then(|()| build_ebpf::object(&workspace));
        Self { workspace, object: object.map_err(|error| format!("{error:#}")), built: None }
    }

    /// The same, with the programs that `file` lists in place of those that Cargo would build.
    pub(super) fn with_built(self, file: &Path) -> Result<Self> {
        let text = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let built = serde_json::from_slice(&text);
        let built = built.with_context(|| format!("{} lists no programs", file.display()))?;
        Ok(Self { built: Some(built), ..self })
    }

    /// The file that holds the kernel half.
    pub(super) fn object(&self) -> Result<&Path> {
        self.object.as_deref().map_err(|why| anyhow!("there is no kernel half: {why}"))
    }

    /// `cargo test WORDS`, of everything but the kernel half itself.
    pub(super) fn cargo_test(&self, words: &[&str]) -> Command {
        let mut command = sh::cargo();
        command.args(["test", "--quiet", "--workspace", "--exclude", "ebpf"]).args(words);
        command.envs(self.object.iter().map(|object| (build_ebpf::VARIABLE, object)));
        command.current_dir(&self.workspace.root);
        command
    }

    /// Builds the tests that `words` choose, or all, with the programs that they start.
    pub(super) fn tests(&self, words: &[&str]) -> Result<Vec<Built>> {
        if let Some(built) = &self.built {
            let wanted = built.iter().filter(|it| words.contains(&it.name.as_str()));
            return Ok(wanted.cloned().collect());
        }
        let mut built = Vec::new();
        let mut command = self.cargo_test(&["--no-run"]);
        command.args(words).arg("--message-format=json-render-diagnostics");
        let ok = sh::watch(&mut command, |line| {
            let message: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
            let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
            let manifest = text(&message["manifest_path"]).unwrap_or_default();
            // Programs that only some test needs, and examples, are named too.
            let is_test = message["profile"]["test"] == true;
            if let Some(executable) = text(&message["executable"]).filter(|_| is_test) {
                built.push(Built {
                    name: text(&message["target"]["name"]).unwrap_or_default(),
                    folder: manifest.trim_end_matches("/Cargo.toml").to_owned(),
                    source: text(&message["target"]["src_path"]).unwrap_or_default(),
                    executable,
                });
            }
        })?;
        if !ok {
            bail!("the tests do not compile");
        }
        Ok(built)
    }

    /// Builds `rouse` and returns its file.
    pub(super) fn rouse(&self) -> Result<PathBuf> {
        // A test of rouse's own brings the program along.
        self.tests(&["--test", "cli"])?;
        Ok(self.workspace.target.join("debug/rouse"))
    }

    /// Builds one target of the package `tests`.
    pub(super) fn target(&self, target: &str) -> Result<String> {
        let source = format!("tests/{target}/main.rs");
        let built = self.tests(&["--test", target])?;
        let found = built.into_iter().find(|it| it.source.ends_with(&source));
        found.map(|it| it.executable).with_context(|| format!("cargo built no test of {source}"))
    }
}
