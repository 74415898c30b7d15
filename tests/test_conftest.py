"""The leak check sees what it is there to see."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from tests.conftest import Belongings


def test_a_thread_a_descriptor_and_a_child_are_seen_until_they_end() -> None:
    before = Belongings.now()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-behind")
    thread.start()
    reader, writer = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        kinds = [line.split()[0] for line in Belongings.now().left_behind(before)]
        # The pipe's two ends, and our end of the child's input.
        assert kinds == ["child", "descriptor", "descriptor", "descriptor", "thread"]
    finally:
        release.set()
        thread.join()
        os.close(reader)
        os.close(writer)
        child.communicate(b"\n")
    assert Belongings.now().left_behind(before) == []


def test_a_number_used_again_for_another_file_is_seen() -> None:
    first, other = os.pipe()
    before = Belongings.now()
    os.close(first)
    os.close(other)
    again = os.open("/dev/null", os.O_RDONLY)
    try:
        assert Belongings.now().left_behind(before) == [f"descriptor {again}: /dev/null"]
    finally:
        os.close(again)
