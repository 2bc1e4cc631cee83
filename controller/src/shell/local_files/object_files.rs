//! Shell: the folder `objects/` of the local node: writes of changed objects, and the read after a restart.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use common::wire::NamespacedName;
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{FoundFiles, GATHER_TIME, LocalFilesError, collect_yaml_files, is_absent};
use crate::{
    model::{
        knative::key,
        object::{LocalObjectKey, LocalObjectKind},
    },
    read::restore::StoredAppObjects,
    shell::runtime::ControllerRuntime,
};

/// Number of objects rendered at once; it bounds how long the machine is locked.
const OBJECTS_PER_BATCH: usize = 16;

/// Time after which objects that could not be written are tried again.
const RETRY_TIME: Duration = Duration::from_secs(1);

/// Writes objects as they change until `shutdown`, and then the remaining ones. Those that cannot be written are tried
/// again.
pub async fn write_objects_until_shutdown(
    shared: Arc<ControllerRuntime>,
    state_folder: PathBuf,
    shutdown: CancellationToken,
) {
    let objects = state_folder.join("objects");
    let mut failed: BTreeSet<LocalObjectKey> = BTreeSet::new();
    let mut retry_at = Instant::now();
    loop {
        let (is_retry, is_shutdown) = tokio::select! {
            () = shared.wait_for_changed_objects() => (false, false),
            () = tokio::time::sleep_until(retry_at), if !failed.is_empty() => (true, false),
            () = shutdown.cancelled() => (true, true),
        };
        // At shutdown the remaining changes are written at once, and the failed writes are tried a last time.
        if !is_shutdown {
            tokio::time::sleep(GATHER_TIME).await;
        }
        if is_retry {
            shared.add_changed_objects(failed.iter().cloned());
        }
        let (shared, objects, old_failed) = (Arc::clone(&shared), objects.clone(), failed.clone());
        let write = move || write_changed_objects(&shared, &objects, old_failed);
        match tokio::task::spawn_blocking(write).await {
            Ok(still_failed) => failed = still_failed,
            Err(error) => warn!(%error, "writing objects failed"),
        }
        if is_shutdown {
            return;
        }
        // Other changes in the meantime do not delay the retry.
        if retry_at <= Instant::now() {
            retry_at = Instant::now() + RETRY_TIME;
        }
    }
}

/// Writes the changed objects. Returns `failed` with those that cannot be written, and without those that were.
fn write_changed_objects(
    shared: &ControllerRuntime,
    folder: &Path,
    mut failed: BTreeSet<LocalObjectKey>,
) -> BTreeSet<LocalObjectKey> {
    loop {
        let batch = shared.take_changed_objects(OBJECTS_PER_BATCH);
        if batch.is_empty() {
            return failed;
        }
        for (key, object) in batch {
            let path = object_path(folder, &key);
            match write_object(&path, object.as_ref()) {
                Ok(()) => {
                    failed.remove(&key);
                    shared.metrics.count_object_write();
                }
                Err(error) => {
                    // Only the first failure of an object is worth a warning, since attempts repeat every second.
                    if failed.insert(key) {
                        warn!(path = %path.display(), %error, "object not written");
                    } else {
                        debug!(path = %path.display(), %error, "object not written");
                    }
                }
            }
        }
    }
}

fn object_path(folder: &Path, key: &LocalObjectKey) -> PathBuf {
    let folder = folder.join(key.kind.plural()).join(&key.name.namespace);
    folder.join(format!("{}.yaml", key.name.name))
}

/// Writes or removes one object. A reader sees either the old file or the new one, and never a part.
fn write_object(path: &Path, object: Option<&Value>) -> io::Result<()> {
    match object {
        None => match fs::remove_file(path) {
            Err(error) if is_absent(&error) => Ok(()),
            other => other,
        },
        Some(object) => replace_file(path, object),
    }
}

fn replace_file(path: &Path, object: &Value) -> io::Result<()> {
    // JSON is also YAML, and much faster to write and read: ten thousand services have forty thousand objects.
    let text = serde_json::to_vec(object).map_err(io::Error::other)?;
    let draft = path.with_extension("yaml.new");
    match fs::write(&draft, &text) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            fs::create_dir_all(path.parent().unwrap_or(path))?;
            fs::write(&draft, &text)?;
        }
        other => other?,
    }
    fs::rename(&draft, path)
}

/// All objects on disk, grouped by service.
#[derive(Debug, Default)]
pub(super) struct StoredObjects {
    pub(super) apps: BTreeMap<NamespacedName, StoredAppObjects>,
    pub(super) keys: BTreeSet<LocalObjectKey>,
}

/// Reads all objects on disk. A file that cannot be parsed is left out, with a warning.
pub(super) fn read_objects(folder: &Path) -> Result<StoredObjects, LocalFilesError> {
    let mut out = StoredObjects::default();
    for kind in LocalObjectKind::ALL {
        let mut found = FoundFiles::default();
        collect_yaml_files(&folder.join(kind.plural()), &mut found);
        if let Some((path, source)) = found.errors.pop() {
            return Err(LocalFilesError::Folder { path, source });
        }
        for path in found.files {
            let read = fs::read_to_string(&path)
                .map_err(|source| LocalFilesError::Folder { path: path.clone(), source })?;
            // Objects are written as JSON, which is tried first; an edited file may be YAML.
            let json = serde_json::from_str::<Value>(&read);
            match json.or_else(|_| serde_norway::from_str(&read)) {
                Ok(object) if object.is_object() => add_stored_object(&mut out, kind, object),
                // An empty file, which a loss of power can leave, is a YAML document: null, without a name.
                Ok(_) => warn!(path = %path.display(), "object not readable: not a mapping"),
                Err(error) => warn!(path = %path.display(), %error, "object not readable"),
            }
        }
    }
    Ok(out)
}

/// Adds one object to the service that owns it.
fn add_stored_object(out: &mut StoredObjects, kind: LocalObjectKind, object: Value) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let meta = &object["metadata"];
    let name = NamespacedName::new(text(&meta["namespace"]), text(&meta["name"]));
    out.keys.insert(LocalObjectKey { kind, name: name.clone() });
    if kind == LocalObjectKind::Service {
        out.apps.entry(name).or_default().service = object;
        return;
    }
    let owner = match kind {
        LocalObjectKind::Revision | LocalObjectKind::Pod => text(&meta["labels"][key::SERVICE]),
        LocalObjectKind::Service | LocalObjectKind::Configuration | LocalObjectKind::Route => {
            name.name.to_string()
        }
        // They follow from the Revision, and hold no state to restore.
        LocalObjectKind::PodAutoscaler | LocalObjectKind::ServerlessService => return,
    };
    // Services are read first, so an object without one is an orphan.
    let Some(app) = out.apps.get_mut(&NamespacedName::new(name.namespace, owner)) else { return };
    match kind {
        LocalObjectKind::Service
        | LocalObjectKind::PodAutoscaler
        | LocalObjectKind::ServerlessService => {}
        LocalObjectKind::Configuration => app.configuration = object,
        LocalObjectKind::Route => app.route = object,
        LocalObjectKind::Revision => app.revisions.push(object),
        LocalObjectKind::Pod => app.pods.push(object),
    }
}
