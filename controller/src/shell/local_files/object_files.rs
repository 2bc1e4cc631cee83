//! Shell: the folder `objects/` of the local node: writes of changed objects, and the read after a restart.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::Arc,
};

use common::wire::NamespacedName;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{FoundFiles, GATHER_TIME, LocalFilesError, collect_yaml_files};
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

/// Writes objects as they change until `shutdown`, and then the remaining ones.
pub async fn write_objects_until_shutdown(
    shared: Arc<ControllerRuntime>,
    state: PathBuf,
    shutdown: CancellationToken,
) {
    let objects = state.join("objects");
    loop {
        let ended = tokio::select! {
            () = shared.wait_for_changed_objects() => false,
            () = shutdown.cancelled() => true,
        };
        // At shutdown the remaining changes are written at once.
        if !ended {
            tokio::time::sleep(GATHER_TIME).await;
        }
        let (shared, objects) = (Arc::clone(&shared), objects.clone());
        let written =
            tokio::task::spawn_blocking(move || write_changed_objects(&shared, &objects)).await;
        if let Err(error) = written {
            warn!(%error, "writing objects failed");
        }
        if ended {
            return;
        }
    }
}

fn write_changed_objects(shared: &ControllerRuntime, folder: &Path) {
    loop {
        let batch = shared.take_changed_objects(OBJECTS_PER_BATCH);
        if batch.is_empty() {
            return;
        }
        for (key, object) in batch {
            write_object(folder, &key, object.as_ref());
            shared.metrics.count_object_write();
        }
    }
}

/// Writes or removes one object. A reader sees either the old file or the new one, and never a part.
pub(super) fn write_object(folder: &Path, key: &LocalObjectKey, object: Option<&Value>) {
    let folder = folder.join(key.kind.plural()).join(&key.name.namespace);
    let path = folder.join(format!("{}.yaml", key.name.name));
    let done = match object {
        None => match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        },
        Some(object) => replace_file(&folder, &path, object),
    };
    if let Err(error) = done {
        warn!(path = %path.display(), %error, "object not written");
    }
}

fn replace_file(folder: &Path, path: &Path, object: &Value) -> io::Result<()> {
    // JSON is also YAML, and much faster to write and read: ten thousand services have forty thousand objects.
    let text = serde_json::to_vec(object).map_err(io::Error::other)?;
    let draft = path.with_extension("yaml.new");
    match fs::write(&draft, &text) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            fs::create_dir_all(folder)?;
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

/// Reads all objects on disk. One that cannot be parsed is left out, with a warning.
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
            let json = serde_json::from_str(&read);
            let object: Value = match json.or_else(|_| serde_norway::from_str(&read)) {
                Ok(object) => object,
                Err(error) => {
                    warn!(path = %path.display(), %error, "object not readable");
                    continue;
                }
            };
            add_stored_object(&mut out, kind, object);
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
