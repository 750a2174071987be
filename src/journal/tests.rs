//! Tests of a journal as a whole: what is read back after the process, or the host, has died at any point.
//!
//! The death of the process is a copy of the folder at that moment: the kernel keeps all that was written to the mapping. The
//! loss of the host is a copy in which each sector that changed since the last write to the disk has its old or its new
//! contents, by chance.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::path::Path;
use std::time::Duration;

use fastrand::Rng;

use crate::folder::TestFolder;
use crate::{
    JournalCut, JournalError, JournalFolder, JournalOptions, JournalWriter, RecordKind, RecoveryEnd,
    RecoveryError,
};

const KIND: RecordKind = RecordKind(1);
const SECTOR: usize = 512;

fn small() -> JournalOptions {
    JournalOptions { segment_bytes: 8192, snapshot_after_bytes: 1 << 40 }
}

/// The payload of record `number`: 0 to 300 bytes, and sometimes more than a segment.
fn payload_of(number: u64) -> Vec<u8> {
    let mut random = Rng::with_seed(number);
    let length = if random.u8(..) == 0 { random.usize(..20_000) } else { random.usize(..300) };
    (0..length).map(|_| random.u8(..)).collect()
}

fn append(writer: &mut JournalWriter) -> u64 {
    let number = writer.next_record();
    let appended = writer.append(
        KIND,
        || 8 + payload_of(number).len(),
        |space| {
            // The journal may put a mark before the record, so the payload names itself.
            let payload = [&number.to_le_bytes()[..], &payload_of(number)].concat();
            space.get_mut(..payload.len())?.copy_from_slice(&payload);
            Some(payload.len())
        },
    );
    appended.expect("there is room")
}

fn append_many(writer: &mut JournalWriter, count: usize) {
    for _ in 0..count {
        append(writer);
    }
}

/// The contents of a journal.
struct Contents {
    /// The payloads that were replayed, each named by its number at the time of its appending.
    replayed: Vec<u64>,
    snapshot: Option<u64>,
    end: RecoveryEnd,
}

fn try_read(folder: &JournalFolder) -> Result<Contents, RecoveryError<Infallible>> {
    let recovery = folder.recover()?;
    let mut replayed = Vec::new();
    let end = recovery.replay(|record| {
        assert_eq!(record.kind, KIND);
        let (name, payload) = record.payload.split_first_chunk::<8>().expect("a name");
        let name = u64::from_le_bytes(*name);
        assert!(
            name <= record.number && name + 1 >= record.number,
            "record {} is named {name}",
            record.number
        );
        assert_eq!(payload, payload_of(name), "record {}", record.number);
        replayed.push(record.number);
        Ok(())
    })?;
    Ok(Contents { replayed, snapshot: recovery.snapshot().map(|snapshot| snapshot.record), end })
}

fn read(folder: &JournalFolder) -> Contents {
    try_read(folder).unwrap_or_else(|error| panic!("{error}"))
}

fn open(path: &Path) -> JournalFolder {
    JournalFolder::open(path, "a test").expect("a journal")
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten().filter(|entry| entry.path().is_file()) {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn begin(path: &Path, options: JournalOptions) -> JournalWriter {
    let folder = open(path);
    let end = read(&folder).end;
    JournalWriter::begin(folder, &end, options).expect("there is room")
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..5000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    panic!("{what} did not happen");
}

fn write_snapshot(writer: &mut JournalWriter) -> u64 {
    let (record, before) = (writer.next_record(), writer.status().snapshots);
    writer.begin_snapshot(Box::new(move |out| out.write_all(&record.to_le_bytes())));
    wait_until("the snapshot", || writer.status().snapshots > before);
    record
}

#[test]
fn records_survive_the_death_of_the_process_and_a_stop() {
    let folder = TestFolder::new();
    let path = folder.0.join("journal");
    let mut numbers: Vec<u64> = Vec::new();
    for life in 0..6 {
        let mut writer = begin(&path, small());
        (0..40).for_each(|_| numbers.push(append(&mut writer)));
        // A copy is what another process finds after a kill.
        let copy = folder.0.join(format!("copy-{life}"));
        copy_folder(&path, &copy);
        drop(writer);
        assert_eq!(read(&open(&copy)).replayed, numbers, "after a kill");
        let contents = read(&open(&path));
        assert_eq!((contents.replayed, contents.end.cut), (numbers.clone(), None), "after a stop");
    }
}

#[test]
fn a_kill_in_the_middle_of_an_append_loses_this_record_only() {
    let folder = TestFolder::new();
    let path = folder.0.join("journal");
    let mut writer = begin(&path, small());
    append_many(&mut writer, 5);
    let name = "segment-00000001";
    let before = fs::read(path.join(name)).unwrap();
    append(&mut writer);
    let after = fs::read(path.join(name)).unwrap();
    let changed: Vec<usize> = (0..after.len()).filter(|at| before[*at] != after[*at]).collect();
    let (first, last) = (changed[0], changed[changed.len() - 1]);
    // The payload is written before the header, and the checksum last.
    for written in first..=last {
        let image = folder.0.join("image");
        copy_folder(&path, &image);
        let mut torn = after.clone();
        torn[first..first + 16].fill(0);
        torn[written.max(first + 16)..=last.max(first + 16)].fill(0);
        fs::write(image.join(name), &torn).unwrap();
        let folder = open(&image);
        let contents = read(&folder);
        assert_eq!((contents.replayed.len(), contents.end.next_record), (5, 6), "{written}");
        // The journal goes on from there, and the cut records stay cut.
        let mut next = JournalWriter::begin(folder, &contents.end, small()).unwrap();
        append(&mut next);
        drop(next);
        let again = read(&open(&image));
        assert_eq!((again.replayed.len(), again.end.cut), (6, None));
        fs::remove_dir_all(&image).unwrap();
    }
}

#[test]
fn a_damaged_record_is_an_error_that_names_it_and_is_not_skipped() {
    let folder = TestFolder::new();
    let path = folder.0.join("journal");
    let mut writer = begin(&path, small());
    append_many(&mut writer, 30);
    drop(writer);
    let name = path.join("segment-00000001");
    let whole = fs::read(&name).unwrap();
    for at in (64..whole.len() - 24).step_by(7) {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        fs::write(&name, &damaged).unwrap();
        match try_read(&open(&path)) {
            Err(RecoveryError::Journal(JournalError::Damaged { number, .. })) => {
                assert!(number <= 30, "{number}")
            }
            // Padding is not checked, because no code reads it.
            Ok(contents) => assert_eq!(contents.replayed.len(), 30, "byte {at}"),
            Err(other) => panic!("byte {at}: {other}"),
        }
    }
}

#[test]
fn a_missing_segment_is_an_error() {
    let folder = TestFolder::new();
    let path = folder.0.join("journal");
    let mut writer = begin(&path, small());
    append_many(&mut writer, 300);
    drop(writer);
    assert!(read(&open(&path)).replayed.len() == 300);
    fs::rename(path.join("segment-00000002"), folder.0.join("elsewhere")).unwrap();
    let missing = try_read(&open(&path));
    assert!(
        matches!(missing, Err(RecoveryError::Journal(JournalError::Damaged { .. }))),
        "{:?}",
        missing.err()
    );
    fs::rename(path.join("segment-00000001"), folder.0.join("first")).unwrap();
    let missing = try_read(&open(&path));
    assert!(
        matches!(missing, Err(RecoveryError::Journal(JournalError::NoBeginning { .. }))),
        "{:?}",
        missing.err()
    );
}

#[test]
fn a_snapshot_replaces_the_records_before_it_and_a_damaged_one_is_passed_over() {
    let folder = TestFolder::new();
    let path = folder.0.join("journal");
    let mut writer = begin(&path, small());
    let mut snapshots = Vec::new();
    for _ in 0..4 {
        append_many(&mut writer, 200);
        snapshots.push(write_snapshot(&mut writer));
    }
    append_many(&mut writer, 10);
    let next = writer.next_record();
    // A mark at the end says that nothing is missing.
    drop(writer);
    let journal = open(&path);
    assert_eq!(journal.snapshot_records().unwrap(), snapshots[2..], "two snapshots are kept");
    assert!(*journal.segment_indexes().unwrap().first().unwrap() > 1, "and the segments after the older one");
    let contents = read(&journal);
    assert_eq!((contents.snapshot, contents.end.next_record), (Some(snapshots[3]), next + 1));
    assert!(contents.replayed[0] <= snapshots[3] + 1, "a mark may come first");
    let latest = journal.snapshot_path(snapshots[3]);
    let mut bytes = fs::read(&latest).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&latest, &bytes).unwrap();
    let contents = read(&journal);
    assert_eq!((contents.snapshot, contents.end.next_record), (Some(snapshots[2]), next + 1));
    fs::remove_file(journal.snapshot_path(snapshots[2])).unwrap();
    let error = try_read(&journal).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("no intact snapshot") && error.contains("its contents are damaged"), "{error}");
}

/// Appends a record of `bytes` bytes. If there is no room, its user goes on without it.
fn append_or_lose(writer: &mut JournalWriter, bytes: usize) -> bool {
    match writer.append(KIND, || bytes, |space| Some(space.get_mut(..bytes)?.len())) {
        Ok(_) => true,
        Err(error) => {
            writer.record_lost(&error);
            false
        }
    }
}

/// Fills all segments that are there, and loses a record.
fn fill(writer: &mut JournalWriter) -> u64 {
    wait_until("the spare", || writer.status().segments >= 2);
    writer.set_fails_allocations(true);
    let mut kept = 0;
    while append_or_lose(writer, 100) {
        kept += 1;
    }
    kept
}

/// Reads a copy of the folder. Returns the number of replayed records, or the error.
fn read_copy(folder: &TestFolder, path: &Path) -> Result<(u64, RecoveryEnd), RecoveryError<Infallible>> {
    let copy = folder.0.join(format!("copy-{:x}", muster_clock::random_u64()));
    copy_folder(path, &copy);
    let journal = open(&copy);
    let mut replayed = 0;
    let end = journal.recover()?.replay(|_| {
        replayed += 1;
        Ok::<(), Infallible>(())
    })?;
    Ok((replayed, end))
}

#[test]
fn a_refused_record_is_not_lost_and_the_trouble_ends_when_there_is_room() {
    let folder = TestFolder::new();
    let path = folder.0.join("journal");
    let mut writer = begin(&path, small());
    wait_until("the spare", || writer.status().segments >= 2);
    writer.set_fails_allocations(true);
    while writer.append(KIND, || 100, |space| Some(space.get_mut(..100)?.len())).is_ok() {}
    assert!(writer.is_in_trouble() && writer.status().trouble.unwrap().contains("cannot be allocated"));
    assert!(!writer.is_snapshot_due(), "nothing is missing");
    let next = writer.next_record();
    writer.set_fails_allocations(false);
    wait_until("the end of the trouble", || !writer.is_in_trouble());
    assert!(append_or_lose(&mut writer, 100));
    assert_eq!((writer.next_record(), writer.status().lost_records), (next + 1, 0));
}

#[test]
fn after_lost_records_only_a_snapshot_that_contains_them_ends_the_trouble() {
    let folder = TestFolder::new();
    let path = folder.0.join("journal");
    let mut writer = begin(&path, small());
    let kept = fill(&mut writer);
    assert!(writer.is_in_trouble() && writer.status().lost_records == 1);
    // A lost record stays lost, however often the rest is written to the disk.
    writer.sync().request_sync();
    wait_until("a write to the disk", || writer.durable_records() > kept);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(writer.durable_records(), kept + 1);
    // A smaller record, which would fit behind the lost one, does not go there.
    assert!(!append_or_lose(&mut writer, 1));
    writer.set_fails_allocations(false);
    wait_until("an append", || append_or_lose(&mut writer, 9));
    assert!(writer.is_in_trouble() && writer.is_snapshot_due());
    // The death of the process now loses what came after the gap, and nothing before it.
    let (replayed, end) = read_copy(&folder, &path).expect("it can be read");
    let JournalCut { lost_records, why, .. } = end.cut.expect("a cut");
    assert_eq!((replayed, lost_records), (kept, 1), "{why}");
    assert!(why.contains("no room"), "{why}");
    let record = write_snapshot(&mut writer);
    wait_until("the end of the trouble", || !writer.is_in_trouble());
    assert!(append_or_lose(&mut writer, 9));
    let (replayed, end) = read_copy(&folder, &path).expect("it can be read");
    assert_eq!((replayed, end.next_record, end.cut), (1, record + 1, None));
}

#[test]
fn a_snapshot_from_before_the_loss_does_not_end_the_trouble() {
    let folder = TestFolder::new();
    let path = folder.0.join("journal");
    let mut writer = begin(&path, small());
    append(&mut writer);
    let (go, wait) = std::sync::mpsc::channel::<()>();
    writer.begin_snapshot(Box::new(move |out| {
        let _ = wait.recv();
        out.write_all(b"early")
    }));
    fill(&mut writer);
    go.send(()).unwrap();
    wait_until("the early snapshot", || writer.status().snapshots == 1);
    writer.set_fails_allocations(false);
    wait_until("an append", || append_or_lose(&mut writer, 9));
    std::thread::sleep(Duration::from_millis(50));
    assert!(writer.is_in_trouble());
    write_snapshot(&mut writer);
    wait_until("the end of the trouble", || !writer.is_in_trouble());
}

#[test]
fn what_the_disk_refused_never_counts_as_durable() {
    let folder = TestFolder::new();
    let path = folder.0.join("journal");
    let mut writer = begin(&path, small());
    append(&mut writer);
    writer.sync().request_sync();
    wait_until("a write to the disk", || writer.durable_records() == 2);
    writer.set_fails_syncs(true);
    append(&mut writer);
    writer.sync().request_sync();
    wait_until("the trouble", || writer.is_in_trouble());
    writer.set_fails_syncs(false);
    assert!(
        !writer.sync().wait_until_durable(3, Duration::from_millis(50)),
        "the same file is not trusted again"
    );
    assert!(!writer.is_snapshot_due(), "the present segment cannot be used");
    writer.maintain();
    assert!(writer.is_snapshot_due());
    append(&mut writer);
    assert!(!writer.sync().wait_until_durable(3, Duration::from_millis(50)));
    write_snapshot(&mut writer);
    wait_until("the end of the trouble", || !writer.is_in_trouble());
    append(&mut writer);
    assert!(writer.sync().wait_until_durable(writer.next_record(), Duration::from_secs(5)));
    let (replayed, end) = read_copy(&folder, &path).expect("it can be read");
    assert_eq!((replayed, end.cut), (1, None));
}

#[test]
fn a_hole_before_the_snapshot_hides_nothing_after_it() {
    let folder = TestFolder::new();
    let path = folder.0.join("journal");
    let mut writer = begin(&path, JournalOptions { segment_bytes: 1 << 20, ..small() });
    append_many(&mut writer, 20);
    let record = write_snapshot(&mut writer);
    append_many(&mut writer, 10);
    let name = path.join("segment-00000001");
    let mut bytes = fs::read(&name).unwrap();
    bytes[200] ^= 1;
    drop(writer);
    fs::write(&name, &bytes).unwrap();
    let contents = read(&open(&path));
    assert_eq!((contents.snapshot, contents.replayed.len()), (Some(record), 10));
}

/// The files of a folder, by name.
type Image = BTreeMap<String, Vec<u8>>;

fn image_of(path: &Path) -> Image {
    let files = fs::read_dir(path).unwrap().flatten().filter(|entry| entry.path().is_file());
    files
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap_or_default()))
        .collect()
}

/// Returns a mixture of two images: each sector that differs is old or new.
fn lose_power(random: &mut Rng, durable: &Image, present: &Image) -> Image {
    let share = random.u8(..);
    let mut mixed = Image::new();
    for (name, new) in present {
        let old = durable.get(name).cloned().unwrap_or_else(|| vec![0; new.len()]);
        let mut file = new.clone();
        if name.starts_with("segment") {
            for at in (0..new.len()).step_by(SECTOR) {
                let range = at..(at + SECTOR).min(new.len());
                if random.u8(..) < share && range.end <= old.len() {
                    file[range.clone()].copy_from_slice(&old[range]);
                }
            }
        }
        mixed.insert(name.clone(), file);
    }
    mixed
}

#[test]
fn what_was_durable_survives_the_loss_of_the_host() {
    let seeds = std::env::var("JOURNAL_SEEDS").map_or(300, |text| text.parse().expect("a number"));
    let (mut torn, mut lost) = (0, 0);
    for seed in 0..seeds {
        let mut random = Rng::with_seed(seed);
        let folder = TestFolder::new();
        let path = folder.0.join("journal");
        let mut writer = begin(&path, small());
        writer.sync_on_request_only();
        let mut durable_image = image_of(&path);
        let mut durable = 0;
        for _ in 0..random.usize(1..6) {
            append_many(&mut writer, random.usize(1..40));
            if random.bool() {
                let appended = writer.next_record();
                writer.sync().request_sync();
                wait_until("a write to the disk", || writer.durable_records() >= appended);
                (durable, durable_image) = (appended, image_of(&path));
            }
        }
        let appended = writer.next_record();
        let mixed = lose_power(&mut random, &durable_image, &image_of(&path));
        drop(writer);
        let crashed = folder.0.join("crashed");
        fs::create_dir(&crashed).unwrap();
        for (name, bytes) in &mixed {
            fs::write(crashed.join(name), bytes).unwrap();
        }
        let mut journal = open(&crashed);
        journal.pretend_restart_of_host();
        let contents = read(&journal);
        assert!(
            contents.end.next_record >= durable,
            "seed {seed}: {durable} was durable: {:?}",
            contents.end
        );
        assert!(contents.end.next_record <= appended, "seed {seed}");
        assert!(contents.replayed.iter().zip(1..).all(|(number, place)| *number >= place), "seed {seed}");
        torn += u32::from(contents.end.cut.is_some());
        lost += u32::from(contents.end.cut.is_some_and(|cut| cut.lost_records > 0));
    }
    assert!(
        seeds < 100 || (torn > 0 && lost > 0),
        "of {seeds} seeds, {torn} had a cut, {lost} with records behind it"
    );
}

#[test]
fn a_repair_ends_the_journal_before_the_damage_and_keeps_the_rest_aside() {
    let folder = TestFolder::new();
    let path = folder.0.join("journal");
    let mut writer = begin(&path, small());
    append_many(&mut writer, 200);
    drop(writer);
    assert_eq!(open(&path).repair(None).unwrap(), None, "nothing is damaged");
    let second = path.join("segment-00000002");
    let mut bytes = fs::read(&second).unwrap();
    bytes[1000] ^= 1;
    fs::write(&second, &bytes).unwrap();
    let journal = open(&path);
    let repair = journal.repair(None).unwrap().expect("a repair");
    assert_eq!(repair.path, second);
    assert!(repair.removed.len() > 1, "{repair:?}");
    let kept = fs::read_dir(path.join("removed")).unwrap().count();
    assert_eq!(kept, repair.removed.len());
    let contents = read(&journal);
    assert_eq!((contents.end.next_record, contents.end.cut.clone()), (repair.number, None));
    let mut writer = JournalWriter::begin(journal, &contents.end, small()).unwrap();
    append(&mut writer);
    drop(writer);
    let again = read(&open(&path));
    assert_eq!(again.replayed.last(), Some(&repair.number), "the journal goes on");
}

#[test]
fn a_journal_can_begin_with_a_snapshot() {
    let folder = TestFolder::new();
    let journal = open(&folder.0.join("copy"));
    journal.begin_with_snapshot(77, Box::new(|out| out.write_all(b"state"))).unwrap();
    let contents = read(&journal);
    assert_eq!((contents.snapshot, contents.end.next_record), (Some(77), 77));
    assert!(journal.begin_with_snapshot(77, Box::new(|_| Ok(()))).is_err(), "only an empty one");
    let mut writer = JournalWriter::begin(journal, &contents.end, small()).unwrap();
    append(&mut writer);
    drop(writer);
    assert_eq!(read(&open(&folder.0.join("copy"))).replayed, [77]);
}

#[test]
fn a_payload_of_zeroes_is_read_whole_wherever_it_is() {
    for after in [0, 1, 200] {
        let folder = TestFolder::new();
        let path = folder.0.join("journal");
        let mut writer = begin(&path, JournalOptions { segment_bytes: 2 << 20, ..small() });
        // Of two of them, the second one begins another segment.
        for _ in 0..5 {
            assert!(append_or_lose(&mut writer, 1 << 20));
        }
        append_many(&mut writer, after);
        let (replayed, end) = read_copy(&folder, &path).expect("it is whole");
        assert_eq!(replayed, 5 + after as u64, "{end:?}");
        assert!(end.cut.is_none(), "{end:?}");
    }
}
