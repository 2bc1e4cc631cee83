//! Shell: programs of the cluster, built once into the user's cache.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, IsTerminal as _, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, bail};

use super::{
    build_recipes::{BuildRecipe, ManifestModule},
    go_toolchain::GoToolchain,
    versions::{KubernetesVersion, NEWEST},
};
use crate::{lock, sh, toolchain};

/// Variable that envtest defines: a directory with `kube-apiserver`, `etcd` and `kubectl`.
const ASSETS_VARIABLE: &str = "KUBEBUILDER_ASSETS";
const SUPPLIED_PROGRAMS: [&str; 3] = ["kube-apiserver", "etcd", "kubectl"];

/// Paths of the programs, by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClusterPrograms {
    files: BTreeMap<String, PathBuf>,
}

impl ClusterPrograms {
    /// Path of the program `name`, as [`ClusterPrograms::find`] has found it.
    pub(crate) fn file(&self, name: &str) -> Result<&Path> {
        let file = self.files.get(name).map(PathBuf::as_path);
        file.with_context(|| format!("the program {name} was neither found nor built"))
    }

    /// Directories of all programs, to precede `PATH`.
    pub(crate) fn folders(&self) -> Vec<PathBuf> {
        let mut folders: Vec<PathBuf> =
            self.files.values().filter_map(|file| file.parent().map(PathBuf::from)).collect();
        folders.sort();
        folders.dedup();
        folders
    }

    /// Finds the programs in the cache and in `assets`, without building.
    pub(crate) fn find(version: KubernetesVersion, assets: Option<&Path>) -> Result<Self> {
        let mut programs = Self::default();
        for recipe in recipes(version, assets) {
            programs.add_existing(&recipe, &folder(&recipe)?);
        }
        // Any version of Knative's client will do, and users may have installed their own.
        if let Some(kn) = sh::which("kn") {
            programs.files.entry("kn".to_owned()).or_insert(kn);
        }
        if let Some(assets) = assets {
            let supplied =
                SUPPLIED_PROGRAMS.map(|program| (program.to_owned(), assets.join(program)));
            programs.files.extend(supplied.into_iter().filter(|(_, file)| file.is_file()));
        }
        Ok(programs)
    }

    fn add_existing(&mut self, recipe: &BuildRecipe, folder: &Path) {
        for (_, program) in &recipe.programs {
            let file = folder.join(program);
            if file.is_file() {
                self.files.insert((*program).to_owned(), file);
            }
        }
    }
}

/// Directory that `KUBEBUILDER_ASSETS` names; an error if its API server has another minor version.
pub(crate) fn assets(version: KubernetesVersion) -> Result<Option<PathBuf>> {
    let Some(assets) = std::env::var_os(ASSETS_VARIABLE).map(PathBuf::from) else {
        return Ok(None);
    };
    let asset_version = api_server_version(&assets)?;
    if asset_version.minor != version.minor {
        bail!(
            "{ASSETS_VARIABLE} holds {asset_version}, but {version} is requested: unset it, or leave out --kubernetes"
        );
    }
    Ok(Some(assets))
}

/// Version to run if none is named: the API server's in `KUBEBUILDER_ASSETS`, or the newest.
pub(crate) fn default_version() -> Result<KubernetesVersion> {
    match std::env::var_os(ASSETS_VARIABLE) {
        Some(assets) => api_server_version(Path::new(&assets)),
        None => Ok(NEWEST),
    }
}

fn api_server_version(assets: &Path) -> Result<KubernetesVersion> {
    let output = sh::capture(Command::new(assets.join("kube-apiserver")).arg("--version"))
        .with_context(|| {
            format!("{ASSETS_VARIABLE} is {}, where no API server runs", assets.display())
        })?;
    let version = output.split_whitespace().last().unwrap_or_default();
    version
        .parse()
        .ok()
        .with_context(|| format!("{ASSETS_VARIABLE} has `{}`, which is no release", output.trim()))
}

/// Recipes of all programs that `assets` does not supply.
fn recipes(version: KubernetesVersion, assets: Option<&Path>) -> Vec<BuildRecipe> {
    let mut recipes = BuildRecipe::version_independent().to_vec();
    // The API server and kubectl are needed before the others, so Kubernetes comes right after etcd.
    recipes.insert(1, BuildRecipe::kubernetes(version));
    let is_supplied = |program: &str| {
        assets.is_some_and(|assets| {
            SUPPLIED_PROGRAMS.contains(&program) && assets.join(program).is_file()
        })
    };
    for recipe in &mut recipes {
        recipe.programs.retain(|(_, program)| !is_supplied(program));
    }
    recipes.retain(|recipe| !recipe.programs.is_empty());
    recipes
}

/// Recipes whose programs are not in the cache.
pub(crate) fn missing(
    version: KubernetesVersion,
    assets: Option<&Path>,
) -> Result<Vec<BuildRecipe>> {
    let mut missing = Vec::new();
    for recipe in recipes(version, assets) {
        let folder = folder(&recipe)?;
        // An optional recipe that failed once is not tried at every `up`.
        let is_hopeless = recipe.is_optional && failure_note(&recipe)?.exists();
        if !is_hopeless
            && !recipe.programs.iter().all(|(_, program)| folder.join(program).is_file())
        {
            missing.push(recipe);
        }
    }
    Ok(missing)
}

fn folder(recipe: &BuildRecipe) -> Result<PathBuf> {
    Ok(toolchain::cache_directory()?.join("cluster").join(recipe.folder(std::env::consts::ARCH)))
}

/// Path of the note that an optional recipe could not be built, which prevents another attempt.
fn failure_note(recipe: &BuildRecipe) -> Result<PathBuf> {
    let folder = folder(recipe)?;
    Ok(folder.with_file_name(format!("{}.refused", recipe.folder(std::env::consts::ARCH))))
}

/// Program of a recipe with one program: from the `PATH`, from the cache, or built now.
pub(crate) fn find_or_build(recipe: &BuildRecipe) -> Result<PathBuf> {
    let (program, file) = locate(recipe)?;
    if !file.is_file() {
        println!("building {program} once, about {} s", recipe.seconds);
        build_all(recipe, &GoToolchain::find()?)?;
    }
    Ok(file)
}

/// File of the manifests of a recipe in the cache, which is filled now if something of the recipe is missing.
pub(crate) fn find_or_build_manifests(recipe: &BuildRecipe) -> Result<PathBuf> {
    let manifests = recipe.manifests.context("the recipe has no manifests")?;
    Ok(find_or_build_folder(recipe)?.join(manifests.file))
}

/// Directory of the programs of a recipe in the cache, which are built now if one of them is missing.
pub(crate) fn find_or_build_folder(recipe: &BuildRecipe) -> Result<PathBuf> {
    let _lock = lock::acquire(&toolchain::cache_directory()?.join("cluster.lock"))?;
    if let Some(folder) = find_folder(recipe)? {
        return Ok(folder);
    }
    let BuildRecipe { name, version, seconds, .. } = recipe;
    println!("building {name} {version} once, about {seconds} s");
    build_all(recipe, &GoToolchain::find()?)?;
    folder(recipe)
}

/// Directory of the programs and manifests of a recipe in the cache; `None` if one of them is missing.
pub(crate) fn find_folder(recipe: &BuildRecipe) -> Result<Option<PathBuf>> {
    let folder = folder(recipe)?;
    let programs = recipe.programs.iter().map(|(_, program)| *program);
    let mut files = programs.chain(recipe.manifests.map(|it| it.file));
    let is_complete = files.all(|file| folder.join(file).is_file());
    Ok(is_complete.then_some(folder))
}

/// Path of kube-proxy of this version: from the cache, or built now with the other programs of Kubernetes.
pub(crate) fn find_or_build_kube_proxy(version: KubernetesVersion) -> Result<PathBuf> {
    let _lock = lock::acquire(&toolchain::cache_directory()?.join("cluster.lock"))?;
    let recipe = BuildRecipe::kubernetes(version);
    let file = folder(&recipe)?.join("kube-proxy");
    if !file.is_file() {
        println!("building Kubernetes once, about {} s", recipe.seconds);
        build_all(&recipe, &GoToolchain::find()?)?;
    }
    Ok(file)
}

/// Returns true if the program of a recipe with one program need not be built.
pub(crate) fn is_available(recipe: &BuildRecipe) -> Result<bool> {
    Ok(locate(recipe)?.1.is_file())
}

/// Name and path of a recipe's only program: on the `PATH`, or in the cache, where the file may not exist yet.
fn locate(recipe: &BuildRecipe) -> Result<(&'static str, PathBuf)> {
    let (_, program) = recipe.programs.first().context("a recipe has a program")?;
    let file = match sh::which(program) {
        Some(path) => path,
        None => folder(recipe)?.join(program),
    };
    Ok((program, file))
}

/// Builds `recipe` into the cache. Failure of an optional recipe is reported, noted, and no error.
pub(crate) fn build(recipe: &BuildRecipe, toolchain: &GoToolchain) -> Result<()> {
    match build_all(recipe, toolchain) {
        Err(error) if recipe.is_optional => {
            let note = failure_note(recipe)?;
            println!("    {} is skipped, see {}", recipe.name, note.display());
            fs::write(&note, format!("{error:#}\n")).context("cannot write to the cache")
        }
        result => result,
    }
}

fn build_all(recipe: &BuildRecipe, toolchain: &GoToolchain) -> Result<()> {
    let folder = folder(recipe)?;
    let base = folder.parent().context("the cache has folders")?;
    // A killed build cannot remove its own directory.
    remove_build_leftovers(base, recipe);
    // Built aside and renamed: an interrupted build must not look complete.
    let name = format!("{}.new-{}", recipe.folder(std::env::consts::ARCH), std::process::id());
    let temporary = base.join(name);
    fs::create_dir_all(&temporary)
        .with_context(|| format!("cannot make {}", temporary.display()))?;
    let built = build_into(recipe, toolchain, &temporary).and_then(|()| {
        let _absent_or_broken = fs::remove_dir_all(&folder);
        fs::rename(&temporary, &folder).with_context(|| format!("cannot fill {}", base.display()))
    });
    if built.is_err() {
        let _absent = fs::remove_dir_all(&temporary);
    }
    built
}

/// Removes leftovers of killed builds beside the directory.
fn remove_build_leftovers(base: &Path, recipe: &BuildRecipe) {
    let prefix = format!("{}.new-", recipe.folder(std::env::consts::ARCH));
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let builder = name.strip_prefix(&prefix);
        // The directory of a build that still runs stays: its name has the builder's process id.
        if builder.is_some_and(|id| !Path::new("/proc").join(id).exists()) {
            let _gone = fs::remove_dir_all(entry.path());
        }
    }
}

fn build_into(recipe: &BuildRecipe, toolchain: &GoToolchain, folder: &Path) -> Result<()> {
    // Modules are fetched outside of any module, so that no other one is fetched with them.
    if let Some(manifests) = recipe.manifests {
        write_manifests(recipe, manifests, toolchain, folder)?;
    }
    if recipe.programs.is_empty() {
        return Ok(());
    }
    let published = published_go_mod(recipe, toolchain, folder)?;
    fs::write(folder.join("go.mod"), recipe.go_mod(&published))?;
    if let Some(main) = recipe.main {
        fs::write(folder.join("main.go"), main)?;
    }
    for (package, program) in &recipe.programs {
        let file = folder.join(program).display().to_string();
        let mut command = toolchain.command(folder, &recipe.build_args(package, &file));
        run_build(&mut command, program)?;
    }
    Ok(())
}

/// Content of the module's published `go.mod`.
fn published_go_mod(
    recipe: &BuildRecipe,
    toolchain: &GoToolchain,
    folder: &Path,
) -> Result<String> {
    let module = format!("{}@{}", recipe.module, recipe.version);
    let info = download_module(&module, toolchain, folder)?;
    let file = info["GoMod"].as_str().with_context(|| format!("{module} has no go.mod"))?;
    fs::read_to_string(file).with_context(|| format!("cannot read {file}"))
}

/// Writes the manifests of a module to one file in `folder`.
fn write_manifests(
    recipe: &BuildRecipe,
    manifests: ManifestModule,
    toolchain: &GoToolchain,
    folder: &Path,
) -> Result<()> {
    let module = format!("{}@{}", manifests.module, recipe.version);
    let info = download_module(&module, toolchain, folder)?;
    let from = info["Dir"].as_str().with_context(|| format!("{module} has no files"))?;
    let from = Path::new(from).join(manifests.folder);
    let mut files = Vec::new();
    for entry in fs::read_dir(&from).with_context(|| format!("no {}", from.display()))? {
        files.push(entry?.path());
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    if files.is_empty() {
        bail!("{} has no manifests", from.display());
    }
    // In a fixed order, so that the file is the same on each machine.
    files.sort();
    let mut text = String::new();
    for file in files {
        text.push_str("---\n");
        text.push_str(
            &fs::read_to_string(&file)
                .with_context(|| format!("cannot read {}", file.display()))?,
        );
        text.push('\n');
    }
    let file = folder.join(manifests.file);
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// Fetches a module, and returns the description that `go mod download` prints: paths of its files.
fn download_module(
    module: &str,
    toolchain: &GoToolchain,
    folder: &Path,
) -> Result<serde_json::Value> {
    let args = ["mod", "download", "-json", module].map(str::to_owned);
    let output = sh::capture(&mut toolchain.command(folder, &args))
        .with_context(|| format!("cannot fetch the Go module {module}"))?;
    serde_json::from_str(&output).with_context(|| format!("cannot read what describes {module}"))
}

/// Runs a build and shows its progress: `go build -v` prints each package when it is compiled.
fn run_build(command: &mut Command, program: &str) -> Result<()> {
    let mut child = command.stderr(Stdio::piped()).spawn().context("cannot start go")?;
    let stderr = child.stderr.take().context("the child's output was piped")?;
    let started = Instant::now();
    let is_terminal = std::io::stdout().is_terminal();
    let (mut packages, mut printed_s, mut messages) = (0_u32, 0, Vec::new());
    for line in BufReader::new(stderr).lines() {
        let line = line?;
        packages += u32::from(!line.contains(' '));
        // Lines about downloads and compiled packages do not explain a failure.
        if line.contains(' ') && !line.starts_with("go: downloading") {
            messages.push(line);
        }
        // A terminal gets a line that is redrawn each second; a log file gets one every 20 seconds.
        let seconds = started.elapsed().as_secs();
        if seconds >= printed_s + if is_terminal { 1 } else { 20 } {
            printed_s = seconds;
            let end = if is_terminal { '\r' } else { '\n' };
            print!("    {program}: {packages} packages compiled in {seconds} s{end}");
            std::io::stdout().flush()?;
        }
    }
    if !child.wait()?.success() {
        bail!("cannot build {program}:\n{}", messages.join("\n"));
    }
    println!("    {program}: built in {} s            ", started.elapsed().as_secs());
    Ok(())
}
