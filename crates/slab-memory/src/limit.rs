//! How much memory this process may still take.
//!
//! A mapping larger than that would succeed and then be killed page by page, so it is refused
//! beforehand. The answer is a snapshot: other processes may take memory in the meantime.

use std::fs;
use std::path::{Path, PathBuf};

/// What bounds the memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryLimit {
    /// The memory of the machine that is available without swapping.
    Machine,
    /// The control group this process runs in, or one above it.
    Cgroup,
    /// The address space itself.
    AddressSpace,
}

/// Returns how many bytes this process may still take, and what bounds them.
///
/// `None` where the system does not say (no `/proc`); the mapping itself is then the only test.
pub fn available_memory() -> Option<(u64, MemoryLimit)> {
    available_under(Path::new("/"))
}

fn available_under(root: &Path) -> Option<(u64, MemoryLimit)> {
    let machine = machine_available(&fs::read_to_string(root.join("proc/meminfo")).ok()?)
        .map(|bytes| (bytes, MemoryLimit::Machine));
    let cgroup = cgroup_available(root).map(|bytes| (bytes, MemoryLimit::Cgroup));
    [machine, cgroup]
        .into_iter()
        .flatten()
        .min_by_key(|(bytes, _)| *bytes)
}

/// `MemAvailable` of `/proc/meminfo`, which counts in units of 1,024 bytes.
fn machine_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The least that any control group from ours upwards leaves, version 2 or version 1.
fn cgroup_available(root: &Path) -> Option<u64> {
    let own = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mut least = None;
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (mount, files) = if controllers.is_empty() {
            ("sys/fs/cgroup", &VERSION_2)
        } else if controllers.split(',').any(|name| name == "memory") {
            ("sys/fs/cgroup/memory", &VERSION_1)
        } else {
            continue;
        };
        let mount = root.join(mount);
        let mut group: PathBuf = mount.join(path.trim_start_matches('/'));
        loop {
            if let Some(left) = group_available(&group, files) {
                least = Some(least.map_or(left, |least: u64| least.min(left)));
            }
            if group == mount || !group.pop() || !group.starts_with(&mount) {
                break;
            }
        }
    }
    least
}

struct CgroupFiles {
    limit: &'static str,
    used: &'static str,
    /// The counter in `memory.stat` of page cache that is given back before anyone is killed.
    reclaimable: &'static str,
}

const VERSION_2: CgroupFiles = CgroupFiles {
    limit: "memory.max",
    used: "memory.current",
    reclaimable: "inactive_file",
};
const VERSION_1: CgroupFiles = CgroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};

fn group_available(group: &Path, files: &CgroupFiles) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        fs::read_to_string(group.join(name))
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    // "max" does not parse, which is right: no limit at this level.
    let limit = number(files.limit)?;
    let used = number(files.used).unwrap_or(0);
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat
        .lines()
        .find_map(|line| {
            line.strip_prefix(files.reclaimable)?
                .trim()
                .parse::<u64>()
                .ok()
        })
        .unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn machine(root: &Path) {
        write(
            root,
            "proc/meminfo",
            "MemTotal:  9000 kB\nMemAvailable:   4000 kB\n",
        );
    }

    #[test]
    fn without_a_group_the_machine_is_the_limit() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path());
        assert_eq!(
            available_under(root.path()),
            Some((4_096_000, MemoryLimit::Machine))
        );
    }

    #[test]
    fn the_tightest_group_on_the_way_up_counts() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path());
        write(root.path(), "proc/self/cgroup", "0::/a/b\n");
        write(root.path(), "sys/fs/cgroup/a/b/memory.max", "max\n");
        write(root.path(), "sys/fs/cgroup/a/memory.max", "1000000\n");
        write(root.path(), "sys/fs/cgroup/a/memory.current", "700000\n");
        write(
            root.path(),
            "sys/fs/cgroup/a/memory.stat",
            "anon 5\ninactive_file 100000\n",
        );
        assert_eq!(
            available_under(root.path()),
            Some((400_000, MemoryLimit::Cgroup))
        );
    }

    #[test]
    fn version_1_groups_are_read_too() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path());
        write(root.path(), "proc/self/cgroup", "7:cpu:/x\n4:memory:/x\n");
        write(
            root.path(),
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes",
            "5000\n",
        );
        write(
            root.path(),
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes",
            "6000\n",
        );
        assert_eq!(available_under(root.path()), Some((0, MemoryLimit::Cgroup)));
    }

    #[test]
    fn a_system_that_says_nothing_gives_no_answer() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(available_under(root.path()), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_answers() {
        assert!(available_memory().unwrap().0 > 0);
    }
}
