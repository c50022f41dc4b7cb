//! The resources of kernels, as recorded in a cubin: an ELF file whose section `.nv.info` has
//! attributes of every function.

use std::collections::BTreeMap;

/// The resources of one kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: its stack frame, and what does not fit into registers.
    pub local: u32,
    /// Bytes of shared memory that a block has besides those that a launch gives it.
    pub shared: u32,
}

/// Attributes of `.nv.info` with the number of a symbol and a value (`EIATTR_…` in the output of
/// `cuobjdump -elf`).
const FRAME_SIZE: u8 = 0x11;
const MIN_STACK_SIZE: u8 = 0x12;
const REGISTERS: u8 = 0x2f;

/// The form of an attribute whose value has the size given in the header; of the others the value
/// is in the header.
const SIZED: u8 = 4;

/// Bytes of a section's header, and of a symbol.
const HEADER: usize = 64;
const SYMBOL: usize = 24;

/// A little-endian number of a file.
fn number<const N: usize>(bytes: &[u8], at: usize) -> usize {
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(wide) as usize
}

fn text(table: &[u8], at: usize) -> String {
    let end = table[at..].iter().position(|&byte| byte == 0).unwrap();
    String::from_utf8(table[at..at + end].to_vec()).unwrap()
}

/// Every section by its name. Those without bytes in the file, such as shared memory, keep their
/// size only.
fn sections(file: &[u8]) -> BTreeMap<String, (usize, &[u8])> {
    const NO_BITS: usize = 8;
    let first = number::<8>(file, 0x28);
    let count = number::<2>(file, 0x3c);
    let names = number::<2>(file, 0x3e);
    let header = |index: usize| &file[first + index * HEADER..][..HEADER];
    let bytes = |index: usize| {
        let kind = number::<4>(header(index), 4);
        let at = number::<8>(header(index), 24);
        let size = number::<8>(header(index), 32);
        (size, if kind == NO_BITS { &[][..] } else { &file[at..at + size] })
    };
    let (_, names) = bytes(names);
    (0..count).map(|index| (text(names, number::<4>(header(index), 0)), bytes(index))).collect()
}

/// The resources of every kernel of a cubin, by its name.
pub fn functions(file: &[u8]) -> BTreeMap<String, Resources> {
    assert_eq!(file[..4], *b"\x7fELF");
    let sections = sections(file);
    let (_, symbols) = sections[".symtab"];
    let names: Vec<String> = symbols
        .chunks(SYMBOL)
        .map(|symbol| text(sections[".strtab"].1, number::<4>(symbol, 0)))
        .collect();
    let mut found: BTreeMap<String, Resources> = BTreeMap::new();
    let (_, mut rest) = sections[".nv.info"];
    while let [form, attribute, ..] = *rest {
        let length = if form == SIZED { number::<2>(rest, 2) } else { 0 };
        let value = &rest[4..4 + length];
        if length == 8 && [FRAME_SIZE, MIN_STACK_SIZE, REGISTERS].contains(&attribute) {
            let name = &names[number::<4>(value, 0)];
            let value = number::<4>(value, 4) as u32;
            let of = found.entry(name.clone()).or_default();
            match attribute {
                REGISTERS => of.registers = value,
                _ => of.local = of.local.max(value),
            }
        }
        rest = &rest[4 + length..];
    }
    // Divisions and the like are functions without a separate section, whose stack is counted with
    // that of their callers.
    found.retain(|name, _| sections.contains_key(&format!(".text.{name}")));
    for (name, of) in &mut found {
        of.shared = sections.get(&format!(".nv.shared.{name}")).map_or(0, |(size, _)| *size as u32);
    }
    found
}
