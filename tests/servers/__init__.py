"""Real servers for the storage tests: started on free ports of the loopback interface, ended with the test run."""
